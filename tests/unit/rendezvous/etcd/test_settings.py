"""What is said about etcd, and what is wrong with it."""

import pytest

from torchelastic.errors import ConfigError
from torchelastic.rendezvous.etcd.connection_pool import client_context
from torchelastic.rendezvous.etcd.settings import EtcdSettings, Login, TlsFiles


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text("hunter2\n")
    return path


@pytest.mark.parametrize(
    ("conf", "settings"),
    [
        ({}, EtcdSettings()),
        ({"timeout": 5, "etcd_prefix": None, "cacert": ""}, EtcdSettings()),
        ({"etcd_prefix": "jobs"}, EtcdSettings(prefix="/jobs")),
        ({"etcd_outage": "2.5"}, EtcdSettings(outage=2.5)),
        ({"protocol": "https"}, EtcdSettings(tls=TlsFiles())),
        ({"cacert": "ca"}, EtcdSettings(tls=TlsFiles(cacert="ca"))),
        ({"cert": "c", "key": "k"}, EtcdSettings(tls=TlsFiles(cert="c", key="k"))),
    ],
)
def test_etcd_settings_read_all_keys(conf, settings):
    assert EtcdSettings.of(conf) == settings


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"etcd_prefix": "//"}, "must be a key"),
        ({"etcd_outage": "soon"}, "not a valid duration"),
        ({"etcd_outage": "-1"}, "not a valid duration"),
        ({"protocol": "ftp"}, "use http or https"),
        ({"protocol": "http", "cacert": "ca"}, "cacert cannot be used"),
        ({"key": "k"}, "cert=FILE"),
        ({"etcd_user": "me"}, "both etcd_user and etcd_password_file"),
        ({"etcd_password_file": "x"}, "both etcd_user and etcd_password_file"),
        ({"etcd_user": "me", "etcd_password_file": "/nowhere"}, "No such file"),
    ],
)
def test_etcd_invalid_setting_is_reported(conf, sentence):
    with pytest.raises(ConfigError, match=sentence):
        EtcdSettings.of(conf)


def test_a_password_is_read_from_a_file_and_never_shown(password_file):
    settings = EtcdSettings.of({"etcd_user": "me", "etcd_password_file": str(password_file)})
    assert settings.login == Login("me", "hunter2")
    assert "hunter2" not in f"{settings} {settings!r} {settings.login}"


def test_user_and_password_may_come_from_the_environment(password_file, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ETCD_USER", "env")
    monkeypatch.setenv("TORCHELASTIC_ETCD_PASSWORD_FILE", str(password_file))
    assert EtcdSettings.of({}).login == Login("env", "hunter2")
    assert EtcdSettings.of({"etcd_user": "me"}).login == Login("me", "hunter2")


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"x" * 5000, b"\xff\xfe"])
def test_a_file_that_has_no_password(password_file, content):
    password_file.write_bytes(content)
    with pytest.raises(ConfigError, match="etcd_password_file"):
        EtcdSettings.of({"etcd_user": "me", "etcd_password_file": str(password_file)})


@pytest.mark.parametrize("name", ["cacert", "cert"])
def test_files_that_are_no_certificates(tmp_path, name):
    junk = tmp_path / "junk.pem"
    junk.write_text("hello")
    for path in (junk, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=rf"Cannot use {name}="):
            client_context(TlsFiles(**{name: str(path)}))
