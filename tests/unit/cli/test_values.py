"""What the text of a value means, by table."""

import pytest

from torchelastic.cli import values
from torchelastic.errors import ConfigError


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (values.optional_text, "", None),
        (values.optional_text, "a", "a"),
        (values.whole, "0", 0),
        (values.whole, "12", 12),
        (values.rate, "0", 0.0),
        (values.rate, "200M", 200e6),
        (values.rate, "1.5G", 1.5e9),
        (values.rate, "64k", 64e3),
        (values.seconds, "0", 0.0),
        (values.seconds, "1.5", 1.5),
        (values.positive_seconds, "0.1", 0.1),
        (values.port, "", None),
        (values.port, "0", 0),
        (values.port, "65535", 65535),
        (values.workers, "8", 8),
        (values.workers, "auto", "auto"),
        (values.workers, "gpu", "gpu"),
        (values.endpoint, "", ""),
        (values.endpoint, "node1", "node1"),
        (values.host, "node1", "node1"),
        (values.host, "[0:0:0:0:0:0:0:1]", "0:0:0:0:0:0:0:1"),
        (values.host, "::1", "::1"),
        (values.host, "fe80::1%eth0", "fe80::1%eth0"),
        (values.host, "::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        (values.key_values, "", {}),
        (values.key_values, "a=1, b = x=y ,", {"a": "1", "b": "x=y"}),
        (values.words, "", ()),
        (values.words, "a,b", ("a", "b")),
        (values.words, "a,,b,c", ("a,b", "c")),
        (values.modules, "", ()),
        (values.modules, "numpy, a.b", ("numpy", "a.b")),
        (values.local_ranks, "", None),
        (values.local_ranks, "0,12", frozenset({0, 12})),
        (values.signals, "SIGTERM, SIGUSR1", ("SIGTERM", "SIGUSR1")),
        (values.one_of("a", "b"), "b", "b"),
        (values.optional(values.whole), "", None),
        (values.optional(values.whole), "3", 3),
    ],
)
def test_values(convert, text, value):
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text", "sentence"),
    [
        (values.whole, "-1", "'-1' is no number"),
        (values.whole, "1.5", "whole number"),
        (values.whole, "", "whole number"),
        (values.seconds, "-0.1", "'-0.1' is no time"),
        (values.seconds, "inf", "number of seconds"),
        (values.seconds, "nan", "number of seconds"),
        (values.seconds, "3s", "number of seconds"),
        (values.factor, "1", "'1' is no factor"),
        (values.factor, "0.5", "is no factor"),
        (values.factor, "-2", "is no factor"),
        (values.factor, "much", "is no factor"),
        (values.rate, "fast", "'fast' is no rate"),
        (values.rate, "-1M", "is no rate"),
        (values.rate, "5T", "bytes per second as in 200M"),
        (values.positive_seconds, "0", "seconds above 0"),
        (values.port, "65536", "is no port"),
        (values.port, "-1", "is no port"),
        (values.port, "http", "is no port"),
        (values.workers, "0", "is no number of workers"),
        (values.workers, "-2", "is no number of workers"),
        (values.workers, "tpu", "auto, cpu, gpu or xpu"),
        (values.endpoint, "a:b", "is no endpoint"),
        (values.host, "", "'' is no host"),
        (values.host, "node1:29500", "'node1:29500' is no host: .* without a port"),
        (values.host, "10.0.0.1:80", "is no host"),
        (values.host, "a b", "is no host"),
        (values.key_values, "a", "KEY=VALUE"),
        (values.key_values, "=1", "KEY=VALUE"),
        (values.key_values, "a=", "KEY=VALUE"),
        (values.modules, "a-b", "'a-b' is no module name"),
        (values.modules, "train.py,1x", "'1x' is no module name"),
        (values.local_ranks, "0,a", "no list of local ranks"),
        (values.local_ranks, "-1", "no list of local ranks"),
        (values.signals, "SIGTERM,SIGFOO", "'SIGFOO' is no signal"),
        (values.signals, "", "'' is no signal"),
        (values.signals, "SIGKILL", "'SIGKILL' is no signal that can be handled"),
        (values.one_of("a", "b", "c"), "d", "write a, b or c"),
        (values.one_of("a"), "d", "write a"),
    ],
)
def test_bad_values_are_refused_with_what_to_write(convert, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        convert(text)


@pytest.mark.parametrize("given", ["node1", "[::1]", "node1:99999", "a:b:c", ":9400"])
def test_a_place_to_listen_has_a_port(given):
    with pytest.raises(ConfigError, match=r"has no port|is no endpoint"):
        values.listening(given)
