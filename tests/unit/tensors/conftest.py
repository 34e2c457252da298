from tests.unit.state_fixtures import make_store, one_thread, run, shelf, slate

__all__ = ["make_store", "one_thread", "run", "shelf", "slate"]
