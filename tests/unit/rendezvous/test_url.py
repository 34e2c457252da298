import pytest

from torchelastic.errors import ConfigError
from torchelastic.rendezvous.url import RendezvousUrl, parse

SEED = "etcd://localhost:2379/1234?min_workers=2&max_workers=4"


def made(**more):
    given = {"backend": "etcd", "endpoint": "h:2379", "run_id": "r"}
    return RendezvousUrl(**(given | {"min_workers": 2, "max_workers": 2} | more))


@pytest.mark.parametrize(
    ("url", "read"),
    [
        (SEED, made(endpoint="localhost:2379", run_id="1234", max_workers=4)),
        ("etcd://h/r?min_workers=2", made()),
        ("etcd://h:1/r/?min_workers=2", made(endpoint="h:1")),
        ("etcd://[::1]/r?min_workers=2", made(endpoint="[::1]:2379")),
        ("etcd://a:1,b/r?min_workers=2", made(endpoint="a:1,b:2379")),
        ("etcd://a,[::1]:1,[::2]/r?min_workers=2", made(endpoint="a:2379,[::1]:1,[::2]:2379")),
        ("etcd://h/a%2Fb%20c?min_workers=2", made(run_id="a/b c")),
        ("tcp://h/r?min_workers=2", made(backend="c10d", endpoint="h:29400")),
        (
            "tcp://h:5/r?min_workers=2&max_workers=3",
            made(backend="c10d", endpoint="h:5", max_workers=3),
        ),
        (
            "etcd://h/r?min_workers=2&timeout=600&last_call_timeout=0.5",
            made(timeout=600.0, last_call_timeout=0.5),
        ),
        (
            "tcp://h/r?min_workers=2&quorum=none&progress_timeout=0",
            made(backend="c10d", endpoint="h:29400", quorum="none", progress_timeout=0.0),
        ),
        (
            "tcp://h/r?min_workers=2&witness=/shared/votes",
            made(backend="c10d", endpoint="h:29400", witness="/shared/votes"),
        ),
        (
            "tcp://h/r?min_workers=2&secret_file=/run/secret&tls_ca=ca.pem",
            made(
                backend="c10d",
                endpoint="h:29400",
                files={"secret_file": "/run/secret", "tls_ca": "ca.pem"},
            ),
        ),
        (
            "etcd://h/r?min_workers=2&etcd_prefix=/torchelastic/p2p&protocol=http",
            made(options={"etcd_prefix": "/torchelastic/p2p", "protocol": "http"}),
        ),
    ],
)
def test_url_is_read(url, read):
    assert parse(url) == read


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "is not a rendezvous URL"),
        ("tcp://h/r?min_workers=1&quorum=all", "use majority or none"),
        ("etcd://h/r?min_workers=1&quorum=none", "Unknown parameter"),
        ("localhost:2379/r?min_workers=1", "is not a rendezvous URL"),
        ("zookeeper://h/r?min_workers=1", "where SCHEME is etcd or tcp"),
        ("etcd://[::1/r?min_workers=1", "has no host"),
        ("etcd:///r?min_workers=1", "has no host"),
        ("etcd://a,,b/r?min_workers=1", "has no host"),
        ("etcd://h:99999/r?min_workers=1", "has no host"),
        ("etcd://me:secret@h/r?min_workers=1", "a user or a fragment"),
        ("etcd://h/r?min_workers=1#x", "a user or a fragment"),
        ("etcd://h?min_workers=1", "has no job id"),
        ("etcd://h/r", "lacks min_workers"),
        ("etcd://h/r?min_workers=two", "min_workers='two' in .* is not a whole number"),
        ("etcd://h/r?min_workers=-1", "min_workers='-1' in .* is not a whole number"),
        ("etcd://h/r?min_workers=", "min_workers='' in .* is not a whole number"),
        ("etcd://h/r?min_workers=0", "not a valid range"),
        ("etcd://h/r?min_workers=3&max_workers=2", "not a valid range"),
        ("etcd://h/r?min_workers=1&min_workers=2", "'min_workers' appears twice"),
        ("etcd://h/r?min_workers=1&timeout=soon", "timeout='soon' in .* is not a valid duration"),
        ("etcd://h/r?min_workers=1&last_call_timeout=inf", "'inf' in .* is not a valid duration"),
        ("etcd://h/r?min_workers=1&max_worker=2", "Unknown parameter 'max_worker' in"),
        ("tcp://h/r?min_workers=1&etcd_prefix=/x", "Unknown parameter 'etcd_prefix' in"),
    ],
)
def test_url_that_is_invalid_is_refused(url, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse(url)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
