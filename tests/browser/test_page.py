"""The page in a real browser, with jobs that are made up."""

from __future__ import annotations

import dataclasses

import pytest

from tests.browser import pictures
from tests.browser.conftest import new_tab
from tests.browser.pictures import HOSTILE, told, training
from tests.browser.serving import served
from tests.support import poll_for

NARROW = {"width": 360, "height": 780}
WIDE = {"width": 1240, "height": 900}

OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
#: Texts with too little contrast to what is behind them: letters and ground of each.
FAINT = """() => {
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [0.2126, 0.7152, 0.0722].reduce(
    (sum, weight, place) => sum + weight * channel([r, g, b][place] / 255), 0);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const solid = (text) => text && text !== "none" && (parse(text)[3] ?? 1) === 1;
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      if (solid(getComputedStyle(at).backgroundColor)) return getComputedStyle(at).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.nodeValue.trim());
    if (!own || !element.checkVisibility() || element.matches("title")) continue;
    const style = getComputedStyle(element);
    const inBar = element.closest(".bar") && element.parentElement.querySelector("rect");
    const behind = inBar ? getComputedStyle(inBar).fill : ground(element);
    const letters = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [one, other] = [light(parse(letters)), light(parse(behind))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < 4.5) faint.push([element.className, element.textContent, letters, behind, ratio]);
  }
  return faint;
}"""


def test_the_four_answers_are_at_the_top(show, tab):
    show()
    answers = tab.text(".answers")
    for text in (
        "Training",
        "step 19,877 · 5.12 steps/s",
        "0.27 s",
        "Rank 3 on node-b",
        "ValueError: the batch has 17 samples, 32 are needed",
        "87.1%",
        "58 min 4 s of 1 h 6 min",
    ):
        assert text in answers
    assert tab.page.title() == "Training · step 19,877 · llama-finetune-17"
    assert tab.text("#connection").strip() == "Live"


def test_page_draws_and_tells_what_happened(show, tab):
    show()
    page = tab.page
    lanes = page.locator("#drawing .lane-name").all_text_contents()
    assert [name.partition("node-")[2][:1] for name in lanes[:3]] == ["a", "b", "c"]
    assert page.locator("#drawing .failure .head").count() == 2
    assert page.locator("#drawing .change .head").count() == 2
    assert page.locator("#drawing .line").count() == 2  # the step rate and the loss
    page.click("text=Worlds as table")
    assert page.locator("#worlds-table tbody tr").count() == 5
    assert "started: the nodes have changed" in tab.text("#worlds-table")
    rows = page.locator("table.recoveries tbody tr")
    assert rows.count() == 4
    assert "Node lost" in rows.nth(2).inner_text()
    assert "1.7 s" in rows.nth(2).inner_text()
    parts = rows.nth(2).locator("rect").evaluate_all("all => all.map((one) => one.classList[0])")
    assert parts == ["detect", "wait", "agree", "rebuild", "transfer", "redo"]
    assert "saving state" in tab.text("#goodput")
    label = page.get_attribute("#goodput svg", "aria-label")
    assert label.startswith("Total 1 h 6 min: training 58 min 4 s, start-up 1 min 24 s")
    bad = page.locator("table.bad-steps tbody tr")
    assert bad.count() == 2
    for text in ("Step 17,312 skipped: the gradient is not finite", "nan"):
        assert text in bad.first.inner_text()
    assert "rank 3, micro-batch 5, samples 500, 501, " in bad.first.inner_text()
    assert "515 and 16 more" in bad.first.inner_text()
    assert "2 bad steps, the last: step 17,312" in tab.text(".answers")
    assert "straggler: rank 3" in tab.text("#nodes")
    assert "world-formed" in tab.text("#log")


def test_a_job_of_one_world_has_nothing_to_tell(show, tab):
    show(pictures.alone())
    assert "Nothing\nno failure so far" in tab.text(".answers").replace("\n\n", "\n")
    assert "No failure so far." in tab.text("#failure")
    assert tab.page.locator("#drawing .failure").count() == 0


def test_the_failure_that_ended_a_job_comes_first(show, tab):
    show(pictures.failed(), live=False)
    sections = tab.page.locator("main > *").evaluate_all("all => all.map((one) => one.id)")
    assert sections[1] == "failure"
    failure = tab.text("#failure")
    for text in (
        "The failure that ended the job",
        "exit code 1",
        "ALLREDUCE #36481",
        "raise ValueError(f",
        "shard 17 is short",
        "Consequences: 2",
    ):
        assert text in failure
    assert "Failed" in tab.text(".answers")
    assert "The job has ended" in tab.text("#connection")


def test_a_hang_shows_who_is_missing_and_all_stacks(show, tab):
    show(pictures.hung())
    assert "rank 3 is missing from ALLREDUCE #180" in tab.text("#failure")
    stacks = tab.page.locator("#failure .hang details")
    assert stacks.count() == 4
    first = stacks.first
    assert "Rank 3" in first.inner_text()
    assert "last collective ALLREDUCE #179" in first.inner_text()
    assert "missing" in first.inner_text()
    first.locator("summary").click()
    assert "dist.all_reduce(loss)" in first.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_dark_and_light(show, tab, scheme):
    tab.wear(scheme=scheme)
    _, shown = show()
    ground = tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    assert tab.page.evaluate(FAINT) == []
    shown.show(told(pictures.failed(), live=False))
    tab.wait_for("#connection", "ended")
    assert tab.page.evaluate(FAINT) == []


@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
def test_the_page_never_scrolls_sideways(show, tab, size):
    tab.wear(**size)
    _, shown = show()
    views = (pictures.training, pictures.failed, pictures.hung, pictures.crowd)
    for number, make in enumerate((*views, pictures.many_worlds)):
        shown.show(told(dataclasses.replace(make(), job=f"job {number}")))
        tab.wait_for("h1", f"job {number}")
        tab.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert tab.page.evaluate(OVERFLOW) <= 0, make.__name__


def test_everything_can_be_done_with_the_keyboard(show, tab):
    show()
    page = tab.page
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.textContent") == "Skip to the job"
    assert page.evaluate(f"{focused}.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "main"
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(f"{focused}.id || {focused}.name || {focused}.localName"))
        if seen[-1] == "drawing":
            page.keyboard.press("ArrowLeft")
            tab.wait_for("p.below", "generation 4")
            page.keyboard.press("Escape")
            page.wait_for_selector("p.below", state="detached")
        if seen[-1] == "range":
            page.keyboard.press("ArrowRight")
            page.wait_for_selector("input[value='3600']:checked", state="attached")
        if page.evaluate(f"{focused}.closest('.node') !== null"):
            break
        marked = page.evaluate(
            f"getComputedStyle({focused}).outlineStyle + "
            f"getComputedStyle({focused}.nextElementSibling ?? {focused}).outlineStyle"
        )
        assert "solid" in marked, seen[-1]
    assert {"range", "drawing", "a", "summary", "pre"} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_selector(".node[open] table")
    assert "straggler" in page.inner_text(".node[open] table")


def test_an_update_leaves_alone_what_the_reader_does(show, tab):
    tab.wear(width=800, height=500)
    _, shown = show(pictures.crowd(40, 8), live=False)  # no time passes that is shown
    page = tab.page
    page.click(".node >> nth=3")
    page.wait_for_selector(".node[open] table")
    page.click("#failure summary >> nth=0")  # the traceback, shut
    page.focus("#failure .consequence, #failure details:last-of-type summary")
    page.evaluate(
        """() => {
          getSelection().selectAllChildren(document.querySelector("#failure .sentence"));
          document.querySelector(".events").scrollTop = 33;
          scrollTo({ top: 1200, behavior: "instant" });
          window.before = [document.activeElement, document.querySelector(".node[open]")];
        }"""
    )
    placed = page.evaluate("[scrollY, document.querySelector('.events').scrollTop]")
    view = pictures.crowd(40, 8)
    later = dataclasses.replace(view, step=20_000, ranks=pictures.ranks_of(["node-x"], 1, 1))
    later = dataclasses.replace(later, ranks=(*view.ranks, *later.ranks))
    shown.show(told(later, live=False))
    tab.wait_for(".answers", "step 20,000")
    assert page.evaluate("[scrollY, document.querySelector('.events').scrollTop]") == placed
    assert page.evaluate("document.activeElement === window.before[0]")
    assert page.evaluate("document.querySelector('.node[open]') === window.before[1]")
    assert page.evaluate("document.querySelectorAll('.node[open]').length") == 1
    assert not page.evaluate("document.querySelector('#failure details').open")
    assert page.evaluate("getSelection().toString()") == tab.text("#failure .sentence")


@pytest.mark.parametrize("bad", HOSTILE, ids=["markup", "ends", "marks", "links", "piles", "long"])
def test_page_shows_text_of_users_as_text_only(show, tab, bad):
    tab.wear(**NARROW)
    show(pictures.hostile(bad), text=bad)
    page = tab.page
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    page.wait_for_selector(".node[open] table")
    assert page.evaluate(OVERFLOW) <= 0
    foreign = "img, iframe, object, embed, form, [onerror], [onload], [onmouseover], #injected"
    assert page.locator(f"main :is({foreign}), header :is({foreign})").count() == 0
    assert page.locator("script").count() == 1
    assert page.locator("a:not([href^='#'])").count() == 0
    shown = page.evaluate("document.body.innerText + document.title")
    assert not any(mark in shown for mark in "\u202e\u2066\u200f\x1b\x07\x00\u200b")
    assert len(shown) < 600_000
    assert {"\u202e": "\\u202emirrored\\u2066"}.get(bad[0], bad[:3]) in shown
    # No pile of marks reaches over the lines above and below, no text out of its box.
    assert page.evaluate("document.querySelector('h1').getBoundingClientRect().height") < 400


def test_a_lost_connection_is_reported_and_made_again(show, tab):
    server, shown = show()
    tab.may_lose_server = True
    server.stop()
    tab.wait_for("#connection", "Connection lost")
    assert "Showing the state at" in tab.text("#connection")
    assert "Rank 3 on node-b" in tab.text(".answers")
    server.start()
    tab.wait_for("#connection", "Live")
    shown.show(told(training(step=21_000)))
    tab.wait_for(".answers", "step 21,000")


def test_a_server_that_hangs_counts_as_lost(browser):
    with served(told(training())) as (server, shown), new_tab(browser) as tab:
        tab.page.clock.install()
        tab.go(server.url)
        tab.page.evaluate(
            """() => {
              const line = document.querySelector("#connection");
              window.said = [];
              const note = () => window.said.push(line.textContent);
              new MutationObserver(note).observe(
                line, { childList: true, subtree: true, characterData: true });
            }"""
        )
        shown.silent = True
        tab.page.clock.fast_forward(60_000)
        tab.page.wait_for_function(
            "() => window.said.some((one) => one.startsWith('Connection lost'))"
        )
        tab.wait_for("#connection", "Live")
        tab.check()
        tab.leave()


def test_a_picture_that_cannot_be_read_is_reported(show, tab):
    _, shown = show()
    shown.show_torn()
    tab.wait_for("#connection", "Unreadable data")
    shown.show(told(training(step=21_000)))
    tab.wait_for(".answers", "step 21,000")
    assert tab.text("#connection").strip() == "Live"


def test_4096_ranks_are_summed_up_and_opened_on_demand(show, tab):
    _, shown = show(pictures.crowd())
    page = tab.page
    assert "4,096 ranks" in tab.text("#nodes")
    assert page.locator("#nodes .node").count() == 24
    assert page.evaluate("document.querySelectorAll('*').length") < 3000
    # Those in trouble come first.
    assert "lost" in page.inner_text("#nodes .node >> nth=0")
    assert "straggler: rank 100" in page.inner_text("#nodes .node >> nth=1")
    page.click("#nodes .node >> nth=1")
    page.wait_for_selector(".node[open] table")
    assert page.locator(".node[open] tbody tr").count() == 8
    page.click("#nodes button")
    page.wait_for_function("() => document.querySelectorAll('#nodes .node').length === 48")
    assert page.locator("#drawing .lane-name").first.text_content().startswith("510 nodes")
    assert page.locator("#drawing g[role=img] .track").count() == 3
    shown.show(told(dataclasses.replace(pictures.crowd(), step=20_500)))
    tab.wait_for(".answers", "step 20,500")


def test_two_hundred_worlds_stay_readable(show, tab):
    show(pictures.many_worlds())
    box = tab.page.locator("#drawing").bounding_box()
    assert box["height"] < 900
    assert tab.page.locator("#drawing .hair").count() <= 16
    assert tab.page.locator("table.recoveries tbody tr").count() == 10
    assert "50 failures cost" in tab.text("#recoveries")


def test_a_finished_job_is_shown_as_such(show, tab):
    ended = training(
        phase="ended",
        exitcode=0,
        ended=pictures.NOW - 10,
        history=(
            pictures.HistoryEntry(pictures.NOW - 10, "node-a ended", "all workers have finished"),
        ),
    )
    server, _ = show(ended, live=False)
    assert "Finished" in tab.text(".answers")
    assert "all workers have finished" in tab.text(".answers")
    tab.may_lose_server = True
    server.stop()  # its page may go with the job: nothing is lost
    poll_for(lambda: tab.page.evaluate("1") and tab.refused, what="the browser asks again")
    assert "The job has ended" in tab.text("#connection")


def test_nothing_moves_for_who_does_not_want_that(show, tab):
    show()
    moves = "document.getAnimations().some((one) => one.playState === 'running')"
    assert not tab.page.evaluate(moves)
    tab.wear(motion="no-preference")
    assert tab.page.evaluate(moves)


def test_without_scripts_the_page_says_what_to_do_instead(browser):
    with (
        served(told(training())) as (server, _),
        new_tab(browser, java_script_enabled=False) as opened,
    ):
        opened.page.goto(server.url)
        assert "torchelastic status" in opened.page.inner_text("noscript")
