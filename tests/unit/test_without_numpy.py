"""torch does not require numpy, so neither do we."""

import subprocess
import sys
import textwrap

from tests.ports import free_port

SCRIPT = """
    import sys, warnings

    class NoNumpy:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "numpy":
                raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    sys.meta_path.insert(0, NoNumpy())
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torchelastic.checkpoint import CheckpointStore
    from torchelastic.tensors import agreement

    directory, port = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    store = CheckpointStore(directory)
    store.save({"weight": torch.arange(4.0)}, 3, together=True)
    store.wait()
    assert torch.equal(store.load(together=True).tree["weight"], torch.arange(4.0))
    assert agreement.of_rank_0({"a": 1}) == {"a": 1}
"""


def test_state_is_saved_and_loaded_without_numpy(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
