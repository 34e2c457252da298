// Helpers for the state of the job that several sections share. Pure.

import { percent } from "./words.js";

/** Labels of the parts of goodput, in drawing order. */
export const PARTS = {
  productive: "training",
  startup: "start-up",
  rendezvous: "rendezvous",
  restore: "restoring state",
  redone: "redone steps",
  skipped: "bad steps",
  checkpoint: "saving state",
  data: "data stalls",
  waiting: "waiting for nodes",
  other: "other",
  unknown: "running (steps not reported)",
};

/** Goodput as a percentage, or `unknown`. */
export function ratioOf(found) {
  return found.ratio === null ? "unknown" : percent(found.ratio);
}

/** Parts of a recovery in the order they happen, with tooltips. */
export const RECOVERY_PARTS = {
  detect: "from the failure to the end of the generation",
  wait: "waiting for enough nodes",
  agree: "until the next world was formed",
  rebuild: "from the next world to training",
  transfer: "comparing and fetching state",
  redo: "redoing lost steps",
};

/** Exit codes of a job that was asked to end: by SIGINT, by SIGTERM. */
export const STOPPED = [130, 143];

/** [part, seconds] of the cost of a recovery so far, in the order they happen. */
export function partsOf(recovery) {
  const known = Object.keys(RECOVERY_PARTS).map((part) => [part, recovery[part] ?? 0]);
  return known.filter(([, value]) => value > 0);
}

/** True for the failure of a worker; a lost node has no rank. */
export function isWorker(cause) {
  return cause.rank >= 0;
}

/** True if a failure ended the job. */
export function hasFailed(view) {
  const badly = view.phase === "ended" && ![0, ...STOPPED].includes(view.exitcode);
  return (badly || view.phase === "died") && view.failure !== null;
}

/** The span of time that the page draws. */
export function extent(view, now) {
  const until = view.ended ?? now;
  const from = view.started ?? view.worlds[0]?.began ?? until - 1;
  return [Math.min(from, until - 1), until];
}
