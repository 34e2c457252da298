"""Parsing of flags, by table."""

from tests.unit.cli.tables import not_refused, wrong
from torchelastic.cli.command_table import (
    BY_NAME,
    DISTRIBUTED_LAUNCH,
    DISTRIBUTED_RUN,
    LAUNCHERS,
    LOGS,
    RENDEZVOUS_SERVE,
    RUN,
)
from torchelastic.cli.flags import FLAGS
from torchelastic.cli.parser import parse
from torchelastic.config import Std, values
from torchelastic.config.flag import GROUPS


def given(argv, environ=None):
    """Return the values that were given, without the defaults."""
    parsed = parse(argv, RUN, environ or {})
    return {dest: parsed[dest] for dest in parsed.values if parsed.given(dest)}


SPELLINGS = [
    ("--nnodes 2", {"nnodes": (2, 2)}),
    ("--nnodes=1:4", {"nnodes": (1, 4)}),
    ("--nproc_per-node=2", {"nproc_per_node": 2}),
    # abbreviations
    ("--nproc 2", {"nproc_per_node": 2}),
    ("--nproc_per 2", {"nproc_per_node": 2}),
    ("--redirect=3", {"redirects": Std.ALL}),
    ("--stand", {"standalone": True}),
    # torchrun's flag goes before ours: --shape, --settle, --enable-bagua-net
    ("--sh 5", {"shutdown_timeout": 5.0}),
    ("--e console", {"event_log_handler": "console"}),
    # short forms
    ("-m", {"module": True}),
    ("-r 3", {"redirects": Std.ALL}),
    ("-r3", {"redirects": Std.ALL}),
    ("-r=3", {"redirects": Std.ALL}),
    ("-mr3", {"module": True, "redirects": Std.ALL}),
    ("-mt 0:1", {"module": True, "tee": {0: Std.OUT}}),
    ("-j1x2", {"shape": (1, 1, 2)}),
    ("-h", {"help": True}),
    # the last one wins, --preload adds up
    ("--role a --role=b", {"role": "b"}),
    ("--preload a,b --preload=c.d", {"preload": ("a", "b", "c.d")}),
    # values that begin with a dash
    ("--rdzv-id=-x", {"rdzv_id": "-x"}),
    ("--role -", {"role": "-"}),
    ("--rdzv-id=", {"rdzv_id": ""}),
    # a value that may be left out
    ("--dashboard", {"dashboard": "auto"}),
    ("--dashboard --standalone", {"dashboard": "auto", "standalone": True}),
    ("--dashboard 8080", {"dashboard": "127.0.0.1:8080"}),
    ("--dashboard node1:8080", {"dashboard": "node1:8080"}),
    ("--dashboard [::1]:8080", {"dashboard": "[::1]:8080"}),
    ("--dashboard=8080", {"dashboard": "127.0.0.1:8080"}),
    ("--dashboard auto", {"dashboard": "auto"}),
    ("--dashboard=", {"dashboard": ""}),
]


def test_spellings():
    assert wrong(lambda line: given([*line.split(), "train.py"]), SPELLINGS) == []


COMMANDS = [
    ("train.py", "train.py"),
    ("-m pkg.train -m x", "pkg.train -m x"),
    ("train.py --nnodes 2 -- -x", "train.py --nnodes 2 -- -x"),
    ("-- --odd.py --bogus", "--odd.py --bogus"),
    ("train.py -- --x --", "train.py --x --"),
    ("-- train.py -- --x", "train.py -- --x"),
    ("--preload numpy train.py", "train.py"),
    ("--nproc 1 - a", "- a"),
    ("--dashboard train.py 8080", "train.py 8080"),
    ("--dashboard 8080 train.py x", "train.py x"),
    ("--dashboard 8080/train.py", "8080/train.py"),
    ("--dashboard -- 8080", "8080"),
    ("--dashboard auto train.py", "train.py"),
    ("--dashboard auto.py", "auto.py"),
    ("--dashboard ./auto", "./auto"),
    ("--dashboard", ""),
    ("", ""),
]


def test_flags_end_where_the_script_begins():
    assert wrong(lambda line: " ".join(parse(line.split(), RUN, {}).command), COMMANDS) == []


MISTAKES = [
    ("--nprocs 2", "Unknown flag --nprocs: did you mean --nproc-per-node?"),
    ("--max-restart-count 2", "did you mean --max-restarts?"),
    ("--rdzv_bakend=c10d", "Unknown flag --rdzv_bakend: did you mean --rdzv-backend?"),
    ("--zzzz", "Unknown flag --zzzz: --help lists all flags"),
    ("-z", "Unknown flag -z"),
    ("-mz", "Unknown flag -mz"),
    ("--n 2", "--n is ambiguous: it matches --nnodes, --nproc-per-node"),
    ("--rdzv 2", "--rdzv is ambiguous: .* Use the full name"),
    ("--nnodes", "--nnodes needs a value"),
    ("--rdzv-id --nnodes 2", "--rdzv-id needs a value: write --rdzv-id=ID"),
    ("-r", "-r needs a value"),
    ("--standalone=1", "--standalone takes no value"),
    ("-m=1", "-m takes no value"),
    ("--nnodes 4:1", "--nnodes '4:1' is not a valid range of nodes: write N or MIN:MAX"),
    ("--nnodes -1", "--nnodes '-1' is not a valid range"),
    ("--nproc 0", "--nproc-per-node '0' is not a valid number of workers"),
    ("-j 2", "-j '2' is not a valid shape"),
    ("--start-method thread", "--start-method 'thread' is not a valid choice: write spawn, fork"),
    ("--numa-binding x", "write node, socket, exclusive or core-complex"),
    ("--logs-specs mine", "--logs-specs 'mine' is not a valid choice: write default"),
    ("--tee 5", "--tee '5' is not a valid set of streams"),
    ("--grow now", "--grow 'now' is not valid: write any"),
    ("--world-sizes 0", "--world-sizes '0' is not a valid set"),
    ("--dashboard 99999 train.py", "--dashboard .*99999"),
    ("--dashboard=node1 train.py", "--dashboard 'node1' has no port"),
    ("--dash 8080", "--dash is ambiguous: it matches --dashboard, --dashboard-token-file"),
]


def test_mistakes_are_explained_in_a_sentence():
    assert not_refused(lambda line: parse(line.split(), RUN, {}), MISTAKES) == []


OTHERS = [
    ("", (None, False, None)),
    ("job", ("job", False, None)),
    ("job --follow --rank 1", ("job", True, {1})),
    ("-f job --rank=0-1", ("job", True, {0, 1})),
    ("-fn3 job", ("job", True, None)),
    ("--follow -- --odd", ("--odd", True, None)),
    ("--rank 1 -- job", ("job", False, {1})),
]


def test_flags_of_other_commands_may_follow_their_argument():
    def seen(line):
        parsed = parse(line.split(), LOGS, {"PET_FOLLOW": "1", "PET_ROLE": "x"})
        return parsed.argument, parsed["follow"], parsed["rank"]

    assert wrong(seen, OTHERS) == []
    mistakes = [
        ("a b", "Unexpected argument 'b': the command takes only JOB."),
        ("a -- b", "Unexpected argument 'b'"),
        ("--zzzz", "Unknown flag --zzzz: --help lists all flags"),
        ("--lines x", "--lines 'x' is not a valid number"),
    ]
    assert not_refused(lambda line: parse(line.split(), LOGS, {}), mistakes) == []
    assert (
        not_refused(
            lambda line: parse(line.split(), RENDEZVOUS_SERVE, {}),
            [("x", "Unexpected argument 'x': the command takes only flags.")],
        )
        == []
    )


# A value for each flag that differs from every default, as text.
_PAIRS = """
shape 1:3x2, nnodes 3, nproc_per_node 5, rdzv_endpoint node7:1, rdzv_conf a=b, node_rank 2,
master_addr node8, master_port 1234, start_method fork, preload numpy, numa_binding node,
signals_to_handle SIGUSR1, redirects 2, tee 2, local_ranks_filter 4, grow every:7,
quorum none, preemption none, world_sizes 1, logs_specs default, print_completion zsh,
replica_size 1
"""
EXAMPLES = dict(pair.split() for pair in _PAIRS.split(","))


def example(flag):
    """A command line with only this flag, and the value of its variable."""
    if flag.is_switch:
        return [flag.name], "1"
    text = EXAMPLES.get(flag.dest, "77")
    return [flag.name, text], text


def test_every_flag_and_its_variables_give_the_same():
    for flag in FLAGS:
        argv, text = example(flag)
        said = given(argv)
        assert list(said) == [flag.dest], flag.name
        assert said[flag.dest] != parse([], RUN, {})[flag.dest], flag.name
        assert given([word.replace("-", "_").replace("__", "--") for word in argv]) == said
        for variable in flag.variables:
            assert given([], {variable: text}) == said, variable


def test_a_flag_wins_over_its_variable_and_that_over_the_default():
    environ = {"PET_NNODES": "3", "PET_ROLE": "b"}
    parsed = parse(["--nnodes", "2"], RUN, environ)
    assert (parsed["nnodes"], parsed["role"]) == ((2, 2), "b")
    assert given(["--preload", "a"], {"PET_PRELOAD": "b"}) == {"preload": ("a",)}


def test_variables_empty_off_and_of_torchs():
    assert given([], {"PET_STANDALONE": "", "PET_NNODES": "", "PET_MAX_RESTARTS": ""}) == {}
    assert given([], {"PET_STANDALONE": "0"}) == {"standalone": False}
    both = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "PET_SHUTDOWN_TIMEOUT": "8"}
    assert given([], both) == {"shutdown_timeout": 8.0}


def test_a_bad_variable_is_named():
    cases = [
        ("PET_NNODES", "4:1", "PET_NNODES '4:1' is not a valid range of nodes"),
        ("PET_STANDALONE", "perhaps", "PET_STANDALONE 'perhaps' is neither yes nor no: write 1"),
        (
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "long",
            "ELASTIC_SHUTDOWN_TIMEOUT 'long' is not a valid time",
        ),
    ]
    assert not_refused(lambda name, text: parse(["t.py"], RUN, {name: text}), cases) == []


def test_defaults_of_the_three_commands():
    names = ("nproc_per_node", "rdzv_backend", "max_restarts", "monitor_interval")
    parsed = [parse([], defaults, {}) for defaults in (RUN, DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH)]
    assert [tuple(each[name] for name in names) for each in parsed] == [
        (1, "c10d", 100, 0.1),
        ("auto", "static", 3, 5.0),
        ("auto", "etcd", 3, 5.0),
    ]


def test_the_table_is_sound():
    for command in BY_NAME.values():
        names = [flag.dest for flag in command.flags]
        shorts = [flag.short for flag in command.flags if flag.short]
        assert (len(set(names)), len(set(shorts))) == (len(names), len(shorts)), command.prog
        assert all(flag.variables == () for flag in command.own_flags)
    assert {flag.group for flag in FLAGS} == set(GROUPS)
    dests = {flag.dest for flag in FLAGS}
    assert all(set(defaults.defaults) <= dests for defaults in LAUNCHERS)


# --- values ---------------------------------------------------------------------------------------


VALUES = [
    (values.optional_text, "", None),
    (values.optional_text, "a", "a"),
    (values.whole, "0", 0),
    (values.rate, "0", 0.0),
    (values.rate, "200M", 200e6),
    (values.rate, "1.5G", 1.5e9),
    (values.rate, "64k", 64e3),
    (values.factor, "0", 0.0),
    (values.factor, "2", 2.0),
    (values.seconds, "0", 0.0),
    (values.seconds, "1.5", 1.5),
    (values.positive_seconds, "0.1", 0.1),
    (values.port, "", None),
    (values.port, "0", 0),
    (values.port, "65535", 65535),
    (values.workers, "8", 8),
    (values.workers, "auto", "auto"),
    (values.endpoint, "", ""),
    (values.endpoint, "node1", "node1"),
    (values.host, "node1", "node1"),
    (values.host, "[0:0:0:0:0:0:0:1]", "0:0:0:0:0:0:0:1"),
    (values.host, "::1", "::1"),
    (values.host, "fe80::1%eth0", "fe80::1%eth0"),
    (values.host, "::ffff:10.0.0.1", "::ffff:10.0.0.1"),
    (values.key_values, "", {}),
    (values.key_values, "a=1, b = x=y ,", {"a": "1", "b": "x=y"}),
    (values.key_values, "'a=1,b=2'", {"a": "1", "b": "2"}),
    (values.key_values, "a='1',b=\"2\"", {"a": "1", "b": "2"}),
    (values.key_values, "'a=1','b=2'", {"a": "1", "b": "2"}),
    (values.key_values, "a=it's", {"a": "it's"}),
    (values.words, "", ()),
    (values.words, "a,,b,c", ("a,b", "c")),
    (values.modules, "", ()),
    (values.modules, "numpy, a.b", ("numpy", "a.b")),
    (values.local_ranks, "", None),
    (values.local_ranks, "0,12", frozenset({0, 12})),
    (values.signals, "SIGTERM, SIGUSR1", ("SIGTERM", "SIGUSR1")),
    (values.one_of("a", "b"), "b", "b"),
    (values.optional(values.whole), "", None),
    (values.optional(values.whole), "3", 3),
]
REFUSED = [
    (values.whole, "-1", "'-1' is not a valid number"),
    (values.whole, "1.5", "whole number"),
    (values.whole, "", "whole number"),
    (values.seconds, "-0.1", "'-0.1' is not a valid time"),
    (values.seconds, "inf", "number of seconds"),
    (values.seconds, "nan", "number of seconds"),
    (values.seconds, "3s", "number of seconds"),
    (values.factor, "1", "'1' is not a valid factor"),
    (values.factor, "much", "is not a valid factor"),
    (values.rate, "fast", "'fast' is not a valid rate"),
    (values.rate, "-1M", "is not a valid rate"),
    (values.rate, "5T", "bytes per second, such as 200M"),
    (values.positive_seconds, "0", "seconds above 0"),
    (values.port, "65536", "is not a valid port"),
    (values.port, "-1", "is not a valid port"),
    (values.port, "http", "is not a valid port"),
    (values.workers, "0", "is not a valid number of workers"),
    (values.workers, "-2", "is not a valid number of workers"),
    (values.workers, "tpu", "auto, cpu, gpu or xpu"),
    (values.endpoint, "a:b", "is not a valid endpoint"),
    (values.host, "", "'' is not a valid host"),
    (values.host, "node1:29500", "'node1:29500' is not a valid host: .* without a port"),
    (values.host, "10.0.0.1:80", "is not a valid host"),
    (values.host, "a b", "is not a valid host"),
    (values.key_values, "a", "KEY=VALUE"),
    (values.key_values, "=1", "KEY=VALUE"),
    (values.key_values, "a=", "KEY=VALUE"),
    (values.key_values, "a=''", "KEY=VALUE"),
    (values.modules, "a-b", "'a-b' is not a valid module name"),
    (values.modules, "train.py,1x", "'1x' is not a valid module name"),
    (values.local_ranks, "0,a", "not a list of local ranks"),
    (values.local_ranks, "-1", "not a list of local ranks"),
    (values.signals, "SIGTERM,SIGFOO", "'SIGFOO' is not a signal"),
    (values.signals, "", "'' is not a signal"),
    (values.signals, "SIGKILL", "'SIGKILL' is not a signal that can be handled"),
    (values.one_of("a", "b", "c"), "d", "write a, b or c"),
    (values.one_of("a"), "d", "write a"),
    (values.listening, "node1", "has no port|is not a valid endpoint"),
    (values.listening, "[::1]", "has no port|is not a valid endpoint"),
    (values.listening, "node1:99999", "has no port|is not a valid endpoint"),
    (values.listening, "a:b:c", "has no port|is not a valid endpoint"),
    (values.listening, ":9400", "has no port|is not a valid endpoint"),
]


def test_values():
    assert wrong(lambda convert, text: convert(text), VALUES) == []


def test_bad_values_are_refused_with_what_to_write():
    assert not_refused(lambda convert, text: convert(text), REFUSED) == []


def test_lists_of_ranks():
    cases = [("0", {0}), ("0,2-4", {0, 2, 3, 4}), (" 1 , 3 - 3", {1, 3})]
    assert wrong(values.ranks, cases) == []
    refused = ["", "a", "1-", "-1", "1,,2", "99999999"]
    assert not_refused(values.ranks, [(text, "not a list of ranks") for text in refused]) == []
