"""Converters of values, by table."""

from tests.unit.cli.tables import not_refused, wrong
from torchelastic.config import values

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
