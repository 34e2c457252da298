// What several sections read from the picture. Pure.

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
};

/** Parts of a recovery, in the order they come, and what they are. */
export const RECOVERY_PARTS = {
  detect: "from the failure to the end of the generation",
  wait: "too few nodes",
  agree: "to the next world",
  rebuild: "from the next world to training",
  transfer: "state that was exchanged and fetched",
  redo: "steps that were lost, done again",
};

const DISRUPTIONS = ["failure", "error", "node-failure"];

/** A picture as it came, with every field there and what is derived from it. */
export function complete(picture) {
  const empty = {
    job: "", phase: "starting", generation: null, size: 0, unnamed: 0, restarts_used: 0,
    min_nodes: null, max_nodes: null, nodes: [], started: null, ended: null, exitcode: null,
    history: [], step: null, rate: null, stepped: null, ranks: [], stragglers: [], worlds: [],
    recoveries: [], goodput: null, rates: [], metrics: {}, failure: null,
  };
  const view = { ...empty, ...picture.view };
  view.recoveries = view.recoveries.map((one) => ({ ...one, is_failure: isFailure(one) }));
  return { log: [], node: null, leader: null, whole: true, ...picture, view };
}

function isFailure(recovery) {
  return DISRUPTIONS.includes(recovery.kind) || (recovery.kind === "unknown" && recovery.failure !== null);
}

/** [name, name, seconds] of each part of a recovery that is known. */
export function partsOf(recovery) {
  return Object.keys(RECOVERY_PARTS).map((part) => [part, part, recovery[part] ?? 0]);
}

/** Whether a failure is a worker's; a node that was lost has no rank. */
export function isWorker(cause) {
  return cause.rank >= 0;
}

/** Whether a failure has ended the job. */
export function hasFailed(view) {
  const over = view.phase === "died" || (view.phase === "ended" && ![0, 130, 143].includes(view.exitcode));
  return over && view.failure !== null;
}

/** From when to when the page draws. */
export function extent(view, now) {
  const until = view.ended ?? now;
  const from = view.started ?? view.worlds[0]?.began ?? until - 1;
  return [Math.min(from, until - 1), until];
}
