from tests.unit.state_fixtures import make_store, one_thread, run, snapshot_agent, status_page

__all__ = ["make_store", "one_thread", "run", "snapshot_agent", "status_page"]
