from tests.unit.state_fixtures import make_store, one_thread, run, shelf, status_page

__all__ = ["make_store", "one_thread", "run", "shelf", "status_page"]
