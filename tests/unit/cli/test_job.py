"""From flags to the job, by table."""

import dataclasses

import pytest

from torchelastic.cli.flags import FLAGS
from torchelastic.cli.flavours import DISTRIBUTED_RUN, RUN
from torchelastic.cli.job import entry_of, launch_config, shape_of
from torchelastic.cli.parser import parse
from torchelastic.config import Entry, LaunchConfig, Std, WorldSizes
from torchelastic.errors import ConfigError


def config_of(*argv, environ=None, flavour=RUN):
    return launch_config(parse(argv, flavour, environ or {}), environ or {})


def test_without_flags_the_job_is_the_default_one():
    config = config_of()
    assert dataclasses.replace(config, run_id="") == LaunchConfig()
    assert config.run_id.startswith("job-")


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["--nproc-per-node", "3"], {"nproc_per_node": 3}),
        (["--role", "a"], {"role": "a"}),
        (["--rdzv-id", "x"], {"run_id": "x"}),
        (["--standalone", "--rdzv-id", "x"], {"run_id": "x"}),
        (["--local-addr", "10.0.0.1"], {"local_addr": "10.0.0.1"}),
        (["--max-restarts", "0"], {"max_restarts": 0}),
        (["--count-resizes"], {"count_resizes": True}),
        (["--straggler-threshold", "2"], {"straggler_threshold": 2.0}),
        (["--straggler-threshold", "0"], {"straggler_threshold": 0.0}),
        (["--replace-stragglers"], {"replace_stragglers": True}),
        (["--settle", "0.5"], {"settle": 0.5}),
        (["--lease", "9"], {"lease": 9.0}),
        (["--wait-for-nodes", "0"], {"wait_for_nodes": 0.0}),
        (["--world-sizes", "1,2"], {"world_sizes": WorldSizes((1, 2))}),
        (["--no-zygote"], {"zygote": False}),
        (["--preload", "a", "--preload", "b"], {"preload": ("a", "b")}),
        (["--start-method", "fork"], {"start_method": "fork"}),
        (["--virtual-local-rank"], {"virtual_local_rank": True}),
        (["--numa-binding", "node"], {"numa_binding": "node"}),
        (["--log-dir", "x"], {"log_dir": "x"}),
        (["-r", "3", "-t", "12:1"], {"redirects": Std.ALL, "tee": {12: Std.OUT}}),
        (["--local-ranks-filter", "0,2"], {"local_ranks_filter": frozenset({0, 2})}),
        (["--duplicate-stdout-filters", "a,b"], {"duplicate_stdout_filters": ("a", "b")}),
        (["--duplicate-stderr-filters", "a,,b"], {"duplicate_stderr_filters": ("a,b",)}),
        (["--event-log-handler", "console"], {"event_log_handler": "console"}),
        (["--metrics-address", "9400"], {"metrics_address": "127.0.0.1:9400"}),
        (["--metrics-address", "[::]:0"], {"metrics_address": "[::]:0"}),
        (["--metrics-token-file", "t"], {"metrics_token_file": "t"}),
        (["--signals-to-handle", "SIGUSR1"], {"signals_to_handle": ("SIGUSR1",)}),
        (["--shutdown-timeout", "2"], {"shutdown_timeout": 2.0}),
        (["--monitor-interval", "1"], {"monitor_interval": 1.0}),
        (["--rdzv-conf", "is_host=1"], {"rdzv_configs": {"is_host": "1"}, "notes": ()}),
        (["--rdzv-secret-file", "a"], {"rdzv_secret_file": "a"}),
        (["--rdzv-conf", "secret_file=a"], {"rdzv_secret_file": "a", "notes": ()}),
        (["--rdzv-secret-file", "b", "--rdzv-conf", "secret_file=a"], {"rdzv_secret_file": "b"}),
        (
            ["--rdzv-tls-cert", "a", "--rdzv-tls-key", "b", "--rdzv-tls-ca", "c"],
            {"rdzv_tls_cert": "a", "rdzv_tls_key": "b", "rdzv_tls_ca": "c"},
        ),
    ],
)
def test_flags_set_fields(argv, fields):
    config = config_of(*argv)
    assert {name: getattr(config, name) for name in fields} == fields


def test_variables_that_are_no_flags():
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}
    assert config_of(environ=environ).log_line_prefix_template == "[${rank}]"
    assert config_of(environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}).shutdown_timeout == 4


@pytest.mark.parametrize(
    ("argv", "environ", "shape"),
    [
        ([], {}, (1, 1, 1)),
        (["--nnodes", "2:4", "--nproc", "8"], {}, (2, 4, 8)),
        (["-j", "2x8"], {}, (2, 2, 8)),
        (["-j", "1:4x8"], {}, (1, 4, 8)),
        (["-j", "2x8"], {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4"}, (2, 2, 8)),
        (["--nnodes", "3"], {"PET_SHAPE": "2x8"}, (3, 3, 8)),
        (["--nproc-per-node", "auto"], {"PET_SHAPE": "2x8"}, (2, 2, "auto")),
        (["--standalone", "--nnodes", "1:4"], {}, (1, 1, 1)),
    ],
)
def test_shapes(argv, environ, shape):
    assert dataclasses.astuple(shape_of(parse(argv, RUN, environ))) == shape


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        (["-j", "2x8", "--nnodes", "2"], {}, "-j and --nnodes say the same thing"),
        (["-j", "2x8", "--nproc", "8"], {}, "-j and --nproc-per-node say the same thing"),
        ([], {"PET_SHAPE": "2x8", "PET_NNODES": "2"}, "-j and --nnodes say the same thing"),
        (["--standalone", "--nnodes", "2"], {}, "--standalone is for one node, not for 2"),
    ],
)
def test_contradicting_shapes_are_refused(argv, environ, sentence):
    with pytest.raises(ConfigError, match=sentence):
        shape_of(parse(argv, RUN, environ))


@pytest.mark.parametrize(
    ("argv", "entry"),
    [
        (["a.py", "--x", "1"], Entry("script", "a.py", ("--x", "1"))),
        (["-m", "a.b", "-v"], Entry("module", "a.b", ("-v",))),
        (["--no-python", "bash", "-c", "true"], Entry("program", "bash", ("-c", "true"))),
        (["--run-path", "/a.py"], Entry("script", "/a.py")),
        (["--run-path", "--no-python", "/a.py"], Entry("script", "/a.py")),
        (["--use-env", "a.py", "x"], Entry("script", "a.py", ("x",))),
        (["--use_env", "a.py", "x"], Entry("script", "a.py", ("x",))),
        (
            ["--no-use-env", "a.py", "x"],
            Entry("script", "a.py", ("--local-rank=${local_rank}", "x")),
        ),
        (["a.py", "${local_rank}"], Entry("script", "a.py", ("${local_rank}",))),
    ],
)
def test_entries(argv, entry):
    assert entry_of(parse(argv, RUN, {}), "prog") == entry


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "There is nothing to run: name a script, as in torchelastic run train.py."),
        (["-m", "--no-python", "a"], "--module and --no-python exclude each other"),
    ],
)
def test_bad_entries_are_refused(argv, sentence):
    with pytest.raises(ConfigError, match=sentence):
        entry_of(parse(argv, RUN, {}), RUN.prog)


def test_flags_of_bagua_are_named_once_and_ignored():
    line = (
        "--bagua_service_port 1 --default_bucket_size=2 --autotune_level 1 "
        "--autotune_max_samples 3 --autotune_sampling_confidence_time 0.5 "
        "--autotune_warmup_time 1.5 --is_output_autotune_log --enable_bagua_net "
        "--bagua-net_switch_on"
    )
    (note,) = config_of(*line.split(), flavour=DISTRIBUTED_RUN).notes
    assert note.startswith("These flags have no meaning here and are ignored: ")
    assert all(flag.name in note for flag in FLAGS if flag.ignored)
