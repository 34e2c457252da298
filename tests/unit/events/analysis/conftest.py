from tests.unit.cli.conftest import runtime_dir

__all__ = ["runtime_dir"]
