// What several sections read from the picture. Pure.

import { percent } from "./words.js";

/** Parts of goodput, in the words people read, in the order they are drawn. */
export const PARTS = {
  productive: "training",
  startup: "start-up",
  rendezvous: "rendezvous",
  restore: "restoring state",
  redone: "redone steps",
  checkpoint: "saving state",
  data: "data stalls",
  waiting: "waiting for nodes",
  other: "other",
  unknown: "running, steps unknown",
};

/** Of goodput: its share of the time, in words. */
export function ratioOf(found) {
  return found.ratio === null ? "unknown" : percent(found.ratio);
}

/** Parts of a recovery, in the order they come, and what they are. */
export const RECOVERY_PARTS = {
  detect: "from the failure to the end of the generation",
  wait: "too few nodes",
  agree: "to the next world",
  rebuild: "from the next world to training",
  transfer: "state that was exchanged and fetched",
  redo: "steps that were lost, done again",
};

/** Exit codes of a job that was asked to end: by SIGINT, by SIGTERM. */
export const STOPPED = [130, 143];

/** [part, seconds] of what a recovery has cost so far, in the order they come. */
export function partsOf(recovery) {
  const known = Object.keys(RECOVERY_PARTS).map((part) => [part, recovery[part] ?? 0]);
  return known.filter(([, value]) => value > 0);
}

/** Whether a failure is a worker's; a node that was lost has no rank. */
export function isWorker(cause) {
  return cause.rank >= 0;
}

/** Whether a failure has ended the job. */
export function hasFailed(view) {
  const badly = view.phase === "ended" && ![0, ...STOPPED].includes(view.exitcode);
  return (badly || view.phase === "died") && view.failure !== null;
}

/** From when to when the page draws. */
export function extent(view, now) {
  const until = view.ended ?? now;
  const from = view.started ?? view.worlds[0]?.began ?? until - 1;
  return [Math.min(from, until - 1), until];
}
