"""Whether a sharded state copies before it writes."""

import pytest

from torchelastic.errors import ConfigError
from torchelastic.training.sharded.sharding import copies


@pytest.mark.parametrize(
    ("wanted", "optimizers", "expected"),
    [
        pytest.param(None, 1, None, id="found out"),
        pytest.param(False, 1, False, id="never"),
        pytest.param(True, 1, True, id="always"),
        pytest.param(None, 2, True, id="several optimizers"),
    ],
)
def test_copies(wanted, optimizers, expected):
    assert copies(wanted, optimizers) is expected


def test_several_optimizers_cannot_do_without():
    with pytest.raises(ConfigError, match="leave copy_before_write=False out"):
        copies(False, 2)
