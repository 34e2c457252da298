// The last failure: its root cause, evidence and consequences. Pure.

import { hasFailed, isWorker } from "./picture.js";
import { h } from "./tree.js";
import { ago, clock, count, oneLine, plain } from "./words.js";

const SIGNALS = {
  ...{ 1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT" },
  ...{ 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2" },
  ...{ 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS" },
};
/** Stacks, and consequences, that are shown at first. */
const SHOWN = 16;

export function failure(picture, state) {
  const { view, now } = picture;
  const found = view.failure;
  const title = hasFailed(view) ? "The failure that ended the job" : "The last failure";
  const when = found ? `${clock(found.wall, now)}, ${ago(found.wall, now)}` : "";
  return h(
    "section",
    { key: "failure", id: "failure", "aria-labelledby": "failure-title" },
    h("h2", { id: "failure-title" }, title, h("span", { class: "aside" }, when)),
    found ? body(found, state) : h("p", { class: "quiet" }, "No failure so far."),
  );
}

function body(found, state) {
  const { cause, hang: stuck, consequences: after } = found;
  const lines = (cause.log_lines ?? []).map((line) => plain(line, 2000));
  return [
    h("p", { class: "sentence user" }, oneLine(found.sentence, 600)),
    cause.hint ? h("p", { class: "hint user" }, oneLine(cause.hint, 400)) : null,
    facts(found, cause),
    cause.traceback ? text("traceback", "Traceback", cause.traceback, true) : null,
    lines.length ? text("log-lines", "Last lines it wrote", lines.join("\n"), true) : null,
    stuck ? hang(stuck, state) : null,
    ...others(after ?? [], state),
  ];
}

/** Exit code or signal in words. */
export function exitWords(cause) {
  if (cause.alive) return "error; the process kept running";
  if (cause.exitcode === null || cause.exitcode === undefined) return "unknown";
  if (cause.exitcode >= 0) return `exit code ${cause.exitcode}`;
  return `killed by ${SIGNALS[-cause.exitcode] ?? `signal ${-cause.exitcode}`}`;
}

function facts(found, cause) {
  const worker = isWorker(cause);
  const rank = `${cause.rank} (local rank ${cause.local_rank}, pid ${cause.pid})`;
  const known = [
    ["rank", worker ? rank : ""],
    ["node", oneLine(cause.node, 200)],
    ["generation", String(cause.generation)],
    ["end", worker ? exitWords(cause) : "the node was lost with all its workers"],
    ["step", Number.isFinite(cause.step) ? count(cause.step) : ""],
    ["last collective", oneLine(cause.collective, 200)],
    ["error", found.sentence.includes(cause.message) ? "" : oneLine(cause.message, 400)],
  ];
  const fact = ([name, value]) =>
    h("div", { key: name }, h("dt", null, name), h("dd", { class: "user" }, value));
  return h("dl", { class: "facts-list" }, known.filter(([, value]) => value).map(fact));
}

/** A long text that folds under its title; `open` is the initial state. */
function text(key, title, given, open = false) {
  return h("details", { key, open }, h("summary", { class: "user" }, title), code(title, given));
}

function code(title, given) {
  const label = typeof title === "string" ? title : "Traceback";
  return h("pre", { tabindex: "0", "aria-label": label }, plain(given));
}

function more(key, all, shown) {
  const left = all.length - shown.length;
  if (left <= 0) return null;
  return h("button", { key: "more", type: "button", "data-more": key }, `Show more: ${left} left`);
}

// --- a hang --------------------------------------------------------------------------------------

function hang(found, state) {
  const ranks = found.ranks ?? [];
  const all = [...ranks.filter((one) => one.missing), ...ranks.filter((one) => !one.missing)];
  const shown = all.slice(0, SHOWN + (state.more.get("stacks") ?? 0));
  return h(
    "div",
    { key: "hang", class: "hang" },
    h("h3", null, "The hang"),
    h("p", { class: "user" }, oneLine(found.text, 400)),
    shown.map(stack),
    more("stacks", all, shown),
  );
}

function stack(one) {
  const place = one.waiting ? "waiting in" : "last collective";
  const where = [
    `on ${oneLine(one.node, 60)}`,
    Number.isFinite(one.step) ? `step ${count(one.step)}` : "",
    one.collective ? `${place} ${oneLine(one.collective, 120)}` : "",
  ];
  const title = [
    h("b", null, `Rank ${one.rank}`),
    ` ${where.filter(Boolean).join(", ")} `,
    one.missing ? h("span", { class: "tag bad" }, "missing") : null,
  ];
  return text(`stack ${one.rank}`, title, one.stack || "The stack could not be read.");
}

// --- consequences --------------------------------------------------------------------------------

function others(all, state) {
  const alone = all.filter((one) => one.by_itself);
  const after = all.filter((one) => !one.by_itself);
  return [
    alone.length ? listed("causes", "Independent failures", alone, state) : null,
    after.length ? listed("consequences", "Consequences", after, state) : null,
  ];
}

function listed(key, title, all, state) {
  const shown = all.slice(0, SHOWN + (state.more.get(key) ?? 0));
  return h(
    "div",
    { key },
    h("h3", null, `${title}: ${count(all.length)}`),
    shown.map((one, place) => other(key, one, place)),
    more(key, all, shown),
  );
}

function other(list, cause, place) {
  const worker = isWorker(cause);
  const why = `${oneLine(cause.message, 200)}${worker ? ` (${exitWords(cause)})` : ""}`;
  const title = [
    h("b", null, worker ? `Rank ${cause.rank}` : "Node"),
    ` ${worker ? "on " : ""}${oneLine(cause.node, 60)}: ${why}`,
  ];
  const key = `${list} ${place}`;
  if (!cause.traceback) return h("p", { key, class: "consequence user" }, title);
  return text(key, title, cause.traceback);
}
