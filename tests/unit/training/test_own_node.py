from __future__ import annotations

from torchelastic.rendezvous import url
from torchelastic.training.own_node import config_for


def test_the_secret_and_the_certificates_of_a_url():
    text = "tcp://h/r?min_workers=2&secret_file=/s&tls_cert=c&tls_key=k&tls_ca=a"
    config = config_for(url.parse(text), None)
    assert config.rdzv_secret_file == "/s"
    assert (config.rdzv_tls_cert, config.rdzv_tls_key, config.rdzv_tls_ca) == ("c", "k", "a")
    assert "secret_file" not in config.rdzv_configs


def test_a_url_without_them():
    config = config_for(url.parse("tcp://h/r?min_workers=2"), None)
    assert config.rdzv_secret_file is None
    assert config.rdzv_tls_cert is None
