// The root cause of the last failure: what it was, where it came from, what came of it. Pure.

import { h } from "./tree.js";
import { hasFailed, isWorker } from "./picture.js";
import { ago, clock, count, oneLine, plain, ranges } from "./words.js";

const SIGNALS = {
  1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
  9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
  24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
};
const SHOWN = 16;

export function failure(picture, state) {
  const { view, now } = picture;
  const found = view.failure;
  const title = hasFailed(view) ? "The failure that ended the job" : "The last failure";
  return h(
    "section",
    { key: "failure", id: "failure", "aria-labelledby": "failure-title" },
    h("h2", { id: "failure-title" }, title,
      h("span", { class: "aside" }, found ? `${clock(found.wall, now)}, ${ago(found.wall, now)}` : "")),
    found ? body(found, state) : h("p", { class: "quiet" }, "Nothing has failed so far."),
  );
}

function body(found, state) {
  const { cause } = found;
  return [
    h("p", { class: "sentence user" }, oneLine(found.sentence, 600)),
    cause.hint ? h("p", { class: "hint user" }, oneLine(cause.hint, 400)) : null,
    facts(found, cause),
    cause.traceback ? text("traceback", "Traceback", cause.traceback) : null,
    cause.log_lines?.length ? text("log-lines", "Last lines it wrote", cause.log_lines.map((line) => plain(line, 2000)).join("\n")) : null,
    found.hang ? hang(found.hang, state) : null,
    found.consequences?.length ? consequences(found.consequences, state) : null,
  ];
}

/** Exit code or signal in words. */
export function exitWords(cause) {
  if (cause.alive) return "it lives on, and waits for the next world";
  if (cause.exitcode === null || cause.exitcode === undefined) return null;
  if (cause.exitcode >= 0) return `exit code ${cause.exitcode}`;
  return `killed by ${SIGNALS[-cause.exitcode] ?? `signal ${-cause.exitcode}`}`;
}

function facts(found, cause) {
  const worker = isWorker(cause);
  const known = [
    ["rank", worker ? `${cause.rank} (local rank ${cause.local_rank}, pid ${cause.pid})` : null],
    ["node", oneLine(cause.node, 200)],
    ["generation", String(cause.generation)],
    ["end", worker ? exitWords(cause) : "the whole node was lost"],
    ["step", cause.step === null || cause.step === undefined ? null : count(cause.step)],
    ["last collective", cause.collective ? oneLine(cause.collective, 200) : null],
    ["error", found.sentence.includes(cause.message) ? null : oneLine(cause.message, 400)],
  ];
  return h("dl", { class: "facts-list" },
    known.filter(([, value]) => value).map(([name, value]) => h("div", { key: name }, h("dt", null, name), h("dd", { class: "user" }, value))));
}

function text(key, title, given, open = true) {
  return h("details", { key, open }, h("summary", null, title),
    h("pre", { tabindex: "0", "aria-label": title }, plain(given)));
}

function hang(found, state) {
  const missing = found.missing ?? [];
  const all = [...(found.ranks ?? [])].sort((one, other) => Number(other.missing) - Number(one.missing) || one.rank - other.rank);
  const shown = all.slice(0, SHOWN + (state.more.get("stacks") ?? 0));
  return h(
    "div",
    { key: "hang", class: "hang" },
    h("h3", null, "The hang"),
    h("p", { class: "user" }, oneLine(found.text, 400)),
    missing.length ? h("p", null, h("b", null, missing.length === 1 ? "Missing from the collective: rank " : "Missing from the collective: ranks "), ranges(missing)) : null,
    shown.map(stack),
    all.length > shown.length ? h("button", { type: "button", "data-more": "stacks" }, `Show more stacks: ${all.length - shown.length} left`) : null,
  );
}

function stack(one) {
  const where = [
    `on ${oneLine(one.node, 60)}`,
    one.step === null || one.step === undefined ? null : `step ${count(one.step)}`,
    one.collective ? oneLine(one.collective, 120) : null,
  ];
  return h("details", { key: `stack ${one.rank}` },
    h("summary", { class: "user" }, h("b", null, `Rank ${one.rank}`), ` ${where.filter(Boolean).join(", ")}`,
      one.missing ? h("span", { class: "tag bad" }, "missing") : null),
    h("pre", { tabindex: "0", "aria-label": `Stack of rank ${one.rank}` }, plain(one.stack) || "no stack could be read"));
}

function consequences(all, state) {
  const shown = all.slice(0, SHOWN + (state.more.get("consequences") ?? 0));
  return h(
    "div",
    { key: "consequences" },
    h("h3", null, `What came of it: ${all.length === 1 ? "one more failure" : `${count(all.length)} more failures`}`),
    shown.map(consequence),
    all.length > shown.length ? h("button", { type: "button", "data-more": "consequences" }, `Show more: ${all.length - shown.length} left`) : null,
  );
}

function consequence(cause) {
  const line = [h("b", null, isWorker(cause) ? `Rank ${cause.rank}` : "A node"), ` on ${oneLine(cause.node, 60)}: ${oneLine(cause.message, 200)} (${exitWords(cause) ?? "end not known"})`];
  const key = `after ${cause.rank}`;
  if (!cause.traceback) return h("p", { key, class: "consequence user" }, line);
  return h("details", { key }, h("summary", { class: "user" }, line), h("pre", { tabindex: "0", "aria-label": `Traceback of rank ${cause.rank}` }, plain(cause.traceback)));
}
