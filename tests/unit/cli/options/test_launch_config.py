"""From flags to the job, by table."""

import dataclasses

from tests.unit.cli.options.test_parser import example
from tests.unit.cli.tables import not_refused, wrong
from torchelastic.cli import reference
from torchelastic.cli.options.command_table import DISTRIBUTED_RUN, RUN
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.launch_config import entry_of, launch_config, shape_of
from torchelastic.cli.options.parser import parse
from torchelastic.config import Entry, LaunchConfig, Std


def config_of(line="", environ=None, defaults=RUN):
    return launch_config(parse(line.split(), defaults, environ or {}), environ or {})


def test_without_flags_the_job_is_the_default_one():
    config = config_of()
    assert dataclasses.replace(config, run_id="") == LaunchConfig()
    assert config.run_id.startswith("job-")


#: Where a flag means another field than the one of its name, or two flags one.
FIELDS = {
    "--rdzv-id x": {"run_id": "x"},
    "--standalone --rdzv-id x": {"run_id": "x"},
    "--no-zygote": {"zygote": False},
    "--preload a --preload b": {"preload": ("a", "b")},
    "-r 3 -t 12:1": {"redirects": Std.ALL, "tee": {12: Std.OUT}},
    "--metrics-address 9400": {"metrics_address": "127.0.0.1:9400"},
    "--metrics-address [::]:0": {"metrics_address": "[::]:0"},
    "--rdzv-conf is_host=1": {"rdzv_configs": {"is_host": "1"}, "notes": ()},
    "--rdzv-secret-file a": {"rdzv_secret_file": "a"},
    "--rdzv-conf secret_file=a": {"rdzv_secret_file": "a", "notes": ()},
    "--rdzv-secret-file b --rdzv-conf secret_file=a": {"rdzv_secret_file": "b"},
    "--rdzv-tls-cert a --rdzv-tls-key b --rdzv-tls-ca c": {
        "rdzv_tls_cert": "a",
        "rdzv_tls_key": "b",
        "rdzv_tls_ca": "c",
    },
}
#: Fields that are made of several flags.
ARRANGED = {"rdzv_endpoint", "rdzv_backend", "node_rank"}
ARRANGED |= {"rdzv_tls_cert", "rdzv_tls_key", "rdzv_tls_ca"}


def test_flags_set_fields():
    def fields(line):
        return {name: getattr(config_of(line), name) for name in FIELDS[line]}

    assert wrong(fields, FIELDS.items()) == []
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    of_their_name = [flag for flag in FLAGS if flag.dest in fields - ARRANGED]
    said = {flag.dest: parse(example(flag)[0], RUN, {}) for flag in of_their_name}
    cases = [(dest, parsed[dest]) for dest, parsed in said.items()]
    assert len(cases) > 30
    assert wrong(lambda dest: getattr(launch_config(said[dest], {}), dest), cases) == []


def test_variables_that_are_no_flags():
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}
    assert config_of(environ=environ).log_line_prefix_template == "[${rank}]"
    assert config_of(environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}).shutdown_timeout == 4


def shape(line, environ):
    return dataclasses.astuple(shape_of(parse(line.split(), RUN, environ)))


def test_shapes():
    cases = [
        ("", {}, (1, 1, 1)),
        ("--nnodes 2:4 --nproc 8", {}, (2, 4, 8)),
        ("-j 2x8", {}, (2, 2, 8)),
        ("-j 1:4x8", {}, (1, 4, 8)),
        ("-j 2x8", {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4"}, (2, 2, 8)),
        ("--nnodes 3", {"PET_SHAPE": "2x8"}, (3, 3, 8)),
        ("--nproc-per-node auto", {"PET_SHAPE": "2x8"}, (2, 2, "auto")),
        ("--standalone --nnodes 1:4", {}, (1, 1, 1)),
    ]
    assert wrong(shape, cases) == []
    contradictions = [
        ("-j 2x8 --nnodes 2", {}, "-j and --nnodes set the same thing"),
        ("-j 2x8 --nproc 8", {}, "-j and --nproc-per-node set the same thing"),
        ("", {"PET_SHAPE": "2x8", "PET_NNODES": "2"}, "-j and --nnodes set the same thing"),
        ("--standalone --nnodes 2", {}, "--standalone is for one node, but the job needs 2"),
    ]
    assert not_refused(shape, contradictions) == []


def test_the_configuration_page_knows_the_fields_of_flags_with_another_name():
    """`test_flags_set_fields` has the others."""
    lines = {
        "shape": "--shape 2:3x2",
        "nnodes": "--nnodes 2:3",
        "rdzv_id": "--rdzv-id x",
        "rdzv_conf": "--rdzv-conf is_host=1",
        "no_zygote": "--no-zygote",
        "no_log_copy": "--no-log-copy",
    }
    assert set(lines) == set(reference.OTHER_FIELDS)
    before = dataclasses.asdict(config_of("--rdzv-endpoint n1:1 --rdzv-id job"))
    for dest, line in lines.items():
        after = dataclasses.asdict(config_of(f"--rdzv-endpoint n1:1 --rdzv-id job {line}"))
        changed = tuple(name for name in before if after[name] != before[name])
        assert changed == reference.OTHER_FIELDS[dest], line


def entry(line):
    return entry_of(parse(line.split(), RUN, {}))


def test_entries():
    cases = [
        ("a.py --x 1", Entry("script", "a.py", ("--x", "1"))),
        ("-m a.b -v", Entry("module", "a.b", ("-v",))),
        ("--no-python bash -c true", Entry("program", "bash", ("-c", "true"))),
        ("--run-path /a.py", Entry("script", "/a.py")),
        ("--run-path --no-python /a.py", Entry("script", "/a.py")),
        ("--use-env a.py x", Entry("script", "a.py", ("x",))),
        ("--no-use-env a.py x", Entry("script", "a.py", ("--local-rank=${local_rank}", "x"))),
        ("a.py ${local_rank}", Entry("script", "a.py", ("${local_rank}",))),
    ]
    assert wrong(entry, cases) == []
    refused = [
        ("", "No script given: name one, as in torchelastic run train.py."),
        ("-m --no-python a", "--module and --no-python exclude each other"),
    ]
    assert not_refused(entry, refused) == []


def test_flags_of_bagua_are_named_once_and_ignored():
    line = (
        "--bagua_service_port 1 --default_bucket_size=2 --autotune_level 1 "
        "--autotune_max_samples 3 --autotune_sampling_confidence_time 0.5 "
        "--autotune_warmup_time 1.5 --is_output_autotune_log --enable_bagua_net "
        "--bagua-net_switch_on"
    )
    (note,) = config_of(line, defaults=DISTRIBUTED_RUN).notes
    assert note.startswith("Ignored flags: ")
    assert all(flag.name in note for flag in FLAGS if flag.ignored)
