// The page: receives the state of the job, and redraws the document from it.

import { badSteps } from "./badsteps.js";
import { Connection } from "./connection.js";
import { failure } from "./failure.js";
import { goodput } from "./goodput.js";
import { answers, names, phase } from "./headline.js";
import { log } from "./log.js";
import { nodes } from "./nodes.js";
import { hasFailed } from "./picture.js";
import { recoveries } from "./recoveries.js";
import { timeline } from "./timeline.js";
import { h, patch } from "./tree.js";
import { clock, count, oneLine } from "./words.js";

/** How many more rows a button shows. */
const MORE = 24;

const main = document.getElementById("main");
/** The reader's choices, and the latest state of the job. */
const state = {
  range: "all",
  cursor: null,
  open: new Set(),
  more: new Map(),
  width: 0,
  connection: "connecting",
  picture: null,
  /** When that state arrived. */
  at: 0,
};
let drawing = false;

/** The sections in reading order; a failure that ended the job comes first. */
function sections(picture) {
  const cause = failure(picture, state);
  const first = hasFailed(picture.view);
  return [
    answers(picture),
    first ? cause : null,
    timeline(picture, state),
    h("div", { key: "pair", class: "pair" }, recoveries(picture, state), goodput(picture)),
    first ? null : cause,
    badSteps(picture),
    nodes(picture, state),
    log(picture),
  ];
}

/** The connection line at the top: its tone and its text. */
function connectionWords(picture) {
  const { connection } = state;
  const when = picture ? clock(picture.now, picture.now) : "";
  if (connection === "unreadable") return ["bad", "Unreadable data: reload the page"];
  if (picture && !picture.live) return ["still", `The job has ended; as of ${when}`];
  if (connection === "connecting") return ["busy", "Connecting"];
  if (connection === "open") return ["good", "Live"];
  const known = picture ? ` Showing the state at ${when}.` : "";
  return ["bad", `Connection lost; reconnecting.${known}`];
}

/** The latest state, with its time advanced while connected. */
function current() {
  const { picture } = state;
  if (!picture) return null;
  if (!picture.live || state.connection !== "open") return picture;
  return { ...picture, now: picture.now + (performance.now() - state.at) / 1000 };
}

function draw() {
  drawing = false;
  const picture = current();
  const [tone, words] = connectionWords(state.picture);
  const line = document.getElementById("connection");
  line.className = `connection ${tone}`;
  patch(line, [h("span", { class: `sign ${tone}`, "aria-hidden": "true" }), words]);
  document.documentElement.dataset.connection = picture?.live ? state.connection : "";
  if (!picture) return;
  document.getElementById("before")?.remove();
  document.title = title(picture);
  state.width ||= main.clientWidth;
  patch(document.getElementById("names"), names(picture));
  patch(main, sections(picture));
}

function title({ view, now }) {
  const step = view.step === null ? "" : ` · step ${count(view.step)}`;
  return `${phase(view, now).word}${step} · ${oneLine(view.job, 60)}`;
}

/** Redraw once per animation frame, and not at all while the page is hidden. */
function redraw() {
  if (drawing || document.hidden) return;
  drawing = true;
  requestAnimationFrame(draw);
}

main.addEventListener("change", (event) => {
  if (event.target.name === "range") {
    state.range = event.target.value;
    redraw();
  }
});

main.addEventListener("click", (event) => {
  const key = event.target.closest("button")?.dataset.more;
  if (key) {
    state.more.set(key, (state.more.get(key) ?? 0) + MORE);
    redraw();
  }
});

// The contents are drawn when opened. Captured: a `toggle` does not bubble.
main.addEventListener("toggle", (event) => {
  const key = event.target.dataset.open;
  if (!key) return;
  if (event.target.open) state.open.add(key);
  else state.open.delete(key);
  redraw();
}, true);

/** Move the cursor over the timeline, from 0 to 1; null: no cursor. */
function point(place) {
  state.cursor = place === null || place < 0 || place > 1 ? null : place;
  redraw();
}

main.addEventListener("pointermove", (event) => {
  const drawn = event.target.closest("#drawing");
  if (!drawn) {
    if (state.cursor !== null && document.activeElement?.id !== "drawing") point(null);
    return;
  }
  const { left, right } = drawn.dataset;
  point((event.clientX - drawn.getBoundingClientRect().left - left) / (right - left));
});
main.addEventListener("pointerleave", () => point(null));
main.addEventListener("focusout", (event) => event.target.id === "drawing" && point(null));
main.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
  if (event.target.id !== "drawing" || (!move && event.key !== "Escape")) return;
  event.preventDefault();
  point(move ? Math.min(1, Math.max(0, (state.cursor ?? 1) + move)) : null);
});

new ResizeObserver(([entry]) => {
  state.width = Math.floor(entry.contentRect.width);
  redraw();
}).observe(main);

document.addEventListener("visibilitychange", redraw);
setInterval(redraw, 1000);

new Connection(
  "events",
  (picture) => {
    state.picture = picture;
    state.at = performance.now();
    redraw();
  },
  (connection) => {
    state.connection = connection;
    redraw();
  },
);
