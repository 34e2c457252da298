"""`--dashboard` of a real job, and `torchelastic dashboard` after it.

What tabs see of the job, and that it sees nothing of them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.ports import free_port
from tests.process.jobs import Job, Node, alive, child_running, job, torchelastic
from tests.support import poll_for
from torchelastic.system import linux

ALONE = "--standalone --no-zygote"
#: Megabytes that the page's process may have beyond what Python and the code take.
ROOM = 64


class Tab:
    """A stream of pictures, as a browser has one."""

    def __init__(self, url: str) -> None:
        self._connection = connection(url)
        self._connection.request("GET", "/events")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def next(self) -> dict:
        """The next picture; {}: there will be none."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return {}

    def until(self, condition: Callable[[dict], object]) -> dict:
        """The first picture of which that is true."""
        while seen := self.next():
            if condition(seen):
                return seen
        raise AssertionError("the stream has ended")

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


@contextlib.contextmanager
def tab(url: str) -> Iterator[Tab]:
    opened = Tab(url)
    try:
        yield opened
    finally:
        opened.close()


def connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=100)


def get(url: str, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    asked = connection(url)
    try:
        asked.request("GET", path, headers=headers)
        answer = asked.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        asked.close()


def picture(url: str) -> dict:
    status, _, body = get(url, "/picture.json")
    assert status == 200, body
    return json.loads(body)


def url_of(node: Node) -> str:
    said = re.compile(r"dashboard: (http://\S+)")
    return poll_for(lambda: said.search(node.stderr), what="where the page is")[1]


def page_of(node: Node) -> int:
    return child_running(node.agent_pid, "torchelastic.dashboard")


def finish(it: Job, node: Node) -> None:
    it.order("finish")
    assert node.wait() == 0, node.stderr


def test_a_hundred_tabs_and_who_never_reads_are_nothing_to_the_job(tmp_path):
    with job(tmp_path, f"{ALONE} --dashboard=0") as it, contextlib.ExitStack() as stack:
        node = it.start()
        it.world(0, 1)
        url = url_of(node)
        page = page_of(node)
        before = picture(url) and memory_of(page)
        tabs = [stack.enter_context(tab(url)) for _ in range(100)]
        deaf = [stack.enter_context(never_reads(url)) for _ in range(60)]
        for opened in tabs:
            opened.until(lambda seen: seen["view"]["generation"] == 0)
        it.order("exit 3", generation=0)
        it.world(1, 1)
        for opened in tabs:
            opened.until(lambda seen: seen["view"]["generation"] == 1)
        assert page_of(node) == page, "what is killed with a generation's workers is not the page"
        assert len(deaf) == 60
        assert memory_of(page) - before < ROOM
        assert niceness_of(page) == min(19, os.nice(0) + linux.POLITE)
        assert Path(f"/proc/{page}/oom_score_adj").read_text().strip() == "1000"
        finish(it, node)
        assert not alive(page)


def never_reads(url: str) -> socket.socket:
    asked = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
    asked.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return asked


def memory_of(pid: int) -> float:
    """Megabytes of its own."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) / 1024


def niceness_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


def test_pages_that_are_killed_frozen_or_without_a_port_cost_the_job_nothing(tmp_path):
    """A node each. The job is done soon although one page does not end by itself."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        job(tmp_path, "--nnodes=1:3 --settle=60 --no-zygote") as it,
    ):
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        killed, frozen = it.start("--dashboard=0"), it.start("--dashboard=0")
        without = it.start(f"--dashboard={where}")
        it.world(0, 3)
        said = f"no dashboard at {where}: Address already in use; the job continues"
        poll_for(lambda: said in without.stderr, what="why there is no page")
        url_of(killed), url_of(frozen)
        os.kill(page_of(killed), signal.SIGKILL)
        stopped = page_of(frozen)
        os.kill(stopped, signal.SIGSTOP)
        said = "the dashboard exited: killed by SIGKILL; the job continues"
        poll_for(lambda: said in killed.stderr, what="that it has ended")
        it.order("exit 3", generation=0, rank=0)
        it.world(1, 3)
        it.order("finish")
        assert [node.wait() for node in it.nodes] == [0, 0, 0], it.said()
        assert not alive(stopped)


def test_dashboard_admits_only_the_token(tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef&=\n")
    with job(tmp_path / "job", f"{ALONE} --dashboard=0 --dashboard-token-file={path}") as it:
        node = it.start()
        it.world(0, 1)
        url = url_of(node)
        assert url.endswith("/?token=0123456789abcdef%26%3D")
        for path in ("/", "/events", "/picture.json", "/static/page.js"):
            assert get(url, path)[0] == 401
        status, headers, _ = get(url, "/?token=0123456789abcdef%26%3D")
        assert (status, headers["Refresh"]) == (200, "0; url=/")
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert get(url, "/", Cookie=cookie)[0] == 200
        assert get(url, "/picture.json", Cookie=cookie)[0] == 200
        page = page_of(node)
        node.kill()
        poll_for(lambda: not alive(page), what="the end of the page: it dies with its agent")
        for log in (tmp_path / "job").rglob("*.jsonl"):
            assert "0123456789abcdef" not in log.read_text(), "a token in the events is no secret"


def test_seed_003_line_39_a_page_behind_a_node_port_asks_for_its_token(tmp_path):
    """`--port service-type=NodePort,container=8080`: the browser names the node and its port.

    Another port than 8080, so that tests do not meet.
    """
    with job(tmp_path, f"{ALONE} --dashboard=0.0.0.0:{free_port()}") as it:
        node = it.start()
        it.world(0, 1)
        printed = url_of(node)
        url = f"http://127.0.0.1:{urlsplit(printed).port}/"
        outside = {"Host": "node7:30080"}
        for path in ("/", "/events", "/picture.json"):
            assert get(url, path, **outside)[0] == 401
        token = printed.partition("/?token=")[2]
        assert len(token) >= 32
        assert get(url, "/picture.json", Authorization=f"Bearer {token}", **outside)[0] == 200
        status, headers, _ = get(url, f"/?token={token}", **outside)
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert status == get(url, "/", Cookie=cookie, **outside)[0] == 200


def test_dashboard_of_unknown_job_is_refused(tmp_path):
    ended = torchelastic("dashboard", str(tmp_path / "nowhere"))
    assert ended.returncode == 64
    assert "on this machine: `torchelastic status` lists" in ended.stderr


def test_a_node_that_does_not_lead_shows_its_own_view_and_who_leads(tmp_path, monkeypatch):
    with job(tmp_path, "--nnodes=2 --no-zygote --dashboard=0") as it:
        first = it.start()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(elsewhere))  # as if it were another machine
        second = it.start()
        it.world(0, 2)
        leader = picture(url_of(first))["node"]
        seen = poll_for(lambda: told_who_leads(url_of(second)), what="who leads")
        assert (seen["leader"], seen["whole"]) == (leader, False)
        assert seen["node"] not in (None, leader)
        poll_for(lambda: picture(url_of(first))["whole"], what="all nodes at the leader's")
        it.order("finish")
        assert [first.wait(), second.wait()] == [0, 0], it.said()


def told_who_leads(url: str) -> dict | None:
    seen = picture(url)
    return seen if seen["leader"] else None
