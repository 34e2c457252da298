// The four answers at the top: is the job training, what did the last failure cost, what failed
// first and why, and how much of the time went into training. Pure.

import { PARTS, STOPPED, isWorker, partsOf, ratioOf } from "./picture.js";
import { h } from "./tree.js";
import { ago, clock, count, counted, oneLine, rate, seconds, span } from "./words.js";

// Seconds. The rate of a job is 0 if its step is overdue, and null before its second step.
const LONG = 10;

/** The state of the job: a word, its tone (good, busy, warn, bad, still), and a sentence. */
export function phase(view, now) {
  const known = ENDS[view.phase] ?? BUSY[view.phase] ?? running;
  const [word, tone, text] = known(view, now);
  return { word, tone, text };
}

const BUSY = {
  starting: () => ["Starting", "busy", "waiting for the first world"],
  waiting: (view) => ["Waiting for nodes", "warn", lastWhy(view) || "not enough nodes"],
  restarting: (view) =>
    view.worlds.at(-1)?.end_kind === "finished"
      ? ["Finishing", "busy", lastWhy(view)]
      : ["Recovering", "warn", lastWhy(view) || "the next world is being formed"],
};

function lastWhy(view) {
  return oneLine(view.history.at(-1)?.why ?? "", 160);
}

const ENDS = {
  died: () => ["Killed", "bad", "its agents disappeared without reporting how it ended"],
  ended: (view) => {
    const why = lastWhy(view);
    if (view.exitcode === 0) return ["Finished", "still", why];
    const [word, tone] = STOPPED.includes(view.exitcode) ? ["Stopped", "still"] : ["Failed", "bad"];
    return [word, tone, `exit code ${view.exitcode}${why ? `: ${why}` : ""}`];
  },
};

function running(view, now) {
  if (view.step === null) {
    return view.goodput?.steps_known === false
      ? ["Running", "busy", "no step seen, so it is unknown whether the job makes progress"]
      : ["Starting", "busy", "no worker has entered a step yet"];
  }
  const since = now - (view.stepped ?? now);
  if (!view.rate && since > LONG) {
    return ["Not progressing", "warn", `no new step for ${span(since)}`];
  }
  return ["Training", "good", ""];
}

/** The name of the job, and the nodes it runs on. */
export function names(picture) {
  const { view } = picture;
  const job = oneLine(view.job, 120) || "a job";
  const facts = [
    view.generation === null ? null : `generation ${view.generation}`,
    view.size ? `${counted(view.size, "worker")} on ${counted(members(view), "node")}` : null,
    wanted(view),
    view.samples ? `trained on ${counted(view.samples, "sample")}` : null,
    view.restarts_used ? `${counted(view.restarts_used, "restart")} used` : null,
    partial(picture),
  ];
  const line = facts.filter(Boolean).join(" · ");
  return [h("h1", { class: "user" }, job), h("p", { class: "facts user" }, line)];
}

/** Only the leader's node has the events of all nodes. */
function partial({ node, leader, whole }) {
  if (whole || !node) return null;
  const seen = `as seen by ${oneLine(node, 60)}`;
  if (!leader || leader === node) return seen;
  return `${seen}; open the dashboard on ${oneLine(leader, 60)}, the leader, to see all nodes`;
}

function members(view) {
  return view.worlds.at(-1)?.count ?? 0;
}

function wanted(view) {
  if (view.min_nodes === null || view.min_nodes === view.max_nodes) return null;
  return `${count(view.min_nodes)} to ${count(view.max_nodes)} nodes allowed`;
}

/** The four answers. */
export function answers(picture) {
  const { view, now } = picture;
  return h(
    "section",
    { key: "answers", class: "answers", "aria-label": "The job at a glance" },
    training(view, now, picture.live),
    lastCost(view, now),
    firstFailure(view, now),
    goodput(view),
  );
}

function answer(key, question, big, tone, ...small) {
  const sign = tone ? h("span", { class: `sign ${tone}`, "aria-hidden": "true" }) : null;
  return h(
    "div",
    { key, class: `answer ${tone}` },
    h("h2", null, question),
    h("p", { class: "big user" }, sign, big),
    small.filter(Boolean).map((text) => h("p", { class: "small user" }, text)),
  );
}

function training(view, now, live) {
  const { word, tone, text } = phase(view, now);
  const pace = [
    view.step === null ? null : `step ${count(view.step)}`,
    view.rate === null || !live ? null : rate(view.rate),
  ];
  const bold = h("b", null, pace.filter(Boolean).join(" · "));
  const small = [bold, text, since(view, now), stored(view, now), weights(view), badStep(view)];
  return answer("training", "Is it training?", word, tone, ...small);
}

/** The latest checkpoint in storage. */
function stored({ checkpoint }, now) {
  if (!checkpoint) return null;
  return `checkpoint of step ${count(checkpoint.step)}, ${ago(checkpoint.wall, now)}`;
}

/** The hash of the weights, with a fixed batch; all of it where the pointer is. */
function weights({ weights: hashed }) {
  if (!hashed) return null;
  const text = `weights sha256 ${hashed.sha256.slice(0, 12)}… at step ${count(hashed.step)}`;
  return h("span", { title: hashed.sha256 }, text);
}

/** The last step with bad numbers. */
function badStep({ bad_steps: all, bad_steps_total: total }) {
  const last = all.at(-1);
  if (!last) return null;
  const text = `${counted(total, "bad step")}, the last: step ${count(last.step)}`;
  return h("a", { href: "#bad-steps" }, text);
}

/** How long the job has been in its current state. */
function since(view, now) {
  if (view.ended !== null && view.started !== null) {
    const after = span(view.ended - view.started);
    return `ended ${clock(view.ended, now)}, ${ago(view.ended, now)}, after ${after}`;
  }
  const world = view.worlds.at(-1);
  if (world && world.ended === null) {
    return `in this world for ${span(now - world.began)}, since ${clock(world.began, now)}`;
  }
  if (view.started === null) return null;
  return `since ${clock(view.started, now)}, for ${span(now - view.started)}`;
}

function lastCost(view, now) {
  const question = "What did the last failure cost?";
  const last = view.recoveries.findLast((one) => one.is_failure);
  if (!last) return answer("cost", question, "Nothing", "", "no failure so far");
  const [most] = partsOf(last).toSorted((one, other) => other[1] - one[1]);
  const unknown = last.done && last.redo === null ? "; redone steps unknown" : "";
  const text = most ? `most of it: ${most[0]} ${seconds(most[1])}${unknown}` : null;
  const when = h("a", { href: "#recoveries" }, `${clock(last.wall, now)}, ${ago(last.wall, now)}`);
  if (!last.done && view.ended !== null) {
    return answer("cost", question, "The job", "", "the job ended with this failure", when);
  }
  const cost = last.done ? seconds(last.cost) : `${seconds(last.cost)} so far`;
  return answer("cost", question, cost, "", text, when);
}

function firstFailure(view, now) {
  const question = "What failed first, and why?";
  const { failure } = view;
  if (!failure) return answer("who", question, "Nothing", "", "no failure so far");
  const { cause } = failure;
  const why = oneLine(cause.message, 160);
  return answer(
    "who",
    question,
    culprit(cause),
    "",
    why,
    cause.hint ? oneLine(cause.hint, 160) : null,
    h("a", { href: "#failure" }, `${clock(failure.wall, now)}, ${ago(failure.wall, now)}`),
  );
}

/** A worker, or a node that was lost with all its workers. */
function culprit(cause) {
  const node = oneLine(cause.node, 40);
  return isWorker(cause) ? `Rank ${cause.rank} on ${node}` : `Node ${node}`;
}

function goodput(view) {
  const found = view.goodput;
  const question = "How much time went into training?";
  if (!found || found.total === 0) return answer("goodput", question, "–", "");
  if (found.ratio === null) return answer("goodput", question, "Unknown", "", "no step seen");
  const losses = Object.entries(found.parts).toSorted((one, other) => other[1] - one[1]);
  const [part, most] = losses[0] ?? ["", 0];
  const spent = `${seconds(found.productive)} of ${seconds(found.total)}`;
  const rest = `most of the rest: ${PARTS[part] ?? part} ${seconds(most)}`;
  const link = most > 0 ? h("a", { href: "#goodput" }, rest) : null;
  return answer("goodput", question, ratioOf(found), "", spent, link);
}
