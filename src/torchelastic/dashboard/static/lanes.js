// Lanes: which node was in which world, and their layout. Pure.

/** With more nodes than this, nodes that were in the same worlds share a lane. */
const APART = 10;
/** More lanes are not drawn. */
const MOST = 60;
const MOST_REPLICAS = 16;
/** Pixels. */
const TALL = 18;
const FLAT = 8;
const NEAR = 16;

/**
 * One lane per node, or per group of nodes that were in the same worlds:
 * { names, worlds: indices into `worlds` }, in the order in which they came.
 */
export function lanesOf(worlds) {
  const inWorlds = new Map();
  worlds.forEach((world, place) => {
    for (const name of world.nodes) {
      if (!inWorlds.has(name)) inWorlds.set(name, []);
      inWorlds.get(name).push(place);
    }
  });
  const lanes = inWorlds.size > APART ? grouped(inWorlds) : alone(inWorlds);
  const unnamed = worlds.map((world) => world.count - world.nodes.length);
  const places = [...unnamed.keys()].filter((place) => unnamed[place] > 0);
  if (places.length) lanes.push({ names: [], beyond: Math.max(...unnamed), worlds: places });
  return lanes.length > MOST ? [...lanes.slice(0, MOST - 1), rest(lanes.slice(MOST - 1))] : lanes;
}

/** One lane per replica of a sharded model, with its ranks in the last world that had it. */
export function replicasOf(worlds) {
  const lanes = [];
  worlds.forEach((world, place) => {
    const number = world.replica > 1 ? Math.floor(world.size / world.replica) : 0;
    for (let index = 0; index < Math.min(number, MOST_REPLICAS); index += 1) {
      lanes[index] ??= { names: [`replica ${index}`], worlds: [] };
      const first = index * world.replica;
      lanes[index].title = `replica ${index}: ranks ${first} to ${first + world.replica - 1}`;
      lanes[index].worlds.push(place);
    }
  });
  return lanes;
}

function alone(inWorlds) {
  return [...inWorlds].map(([name, places]) => ({ names: [name], worlds: places }));
}

function grouped(inWorlds) {
  const lanes = new Map();
  for (const [name, places] of inWorlds) {
    const key = places.join();
    if (lanes.has(key)) lanes.get(key).names.push(name);
    else lanes.set(key, { names: [name], worlds: places });
  }
  // Big groups first; the rest are nodes that came and went.
  return [...lanes.values()].toSorted((one, other) => other.names.length - one.names.length);
}

function rest(lanes) {
  const worlds = [...new Set(lanes.flatMap((lane) => lane.worlds))].toSorted((a, b) => a - b);
  return { names: lanes.flatMap((lane) => lane.names), worlds, mixed: true };
}

/** The label of a lane. */
export function laneName(lane) {
  if (lane.names.length === 0) return `${lane.beyond} more nodes`;
  if (lane.names.length <= 2) return lane.names.join(", ");
  return lane.mixed ? `${lane.names.length} others` : `${lane.names.length} nodes`;
}

export function laneHeight(lanes) {
  return lanes.length > 24 ? FLAT : TALL;
}

/** From seconds to pixels between `left` and `right`. */
export function scale([from, until], left, right) {
  const factor = (right - left) / Math.max(until - from, 1e-9);
  return (wall) => Math.min(right, Math.max(left, left + (wall - from) * factor));
}

/** A lane's worlds as one path: the even generations, or the odd ones. */
export function lanePath(lane, worlds, odd, { x, domain: [first, last] }, y, height) {
  const boxes = [];
  for (const place of lane.worlds) {
    const { generation, began, ended } = worlds[place];
    if (generation % 2 !== Number(odd) || (ended ?? last) < first) continue;
    const from = x(began).toFixed(1);
    const width = Math.max(x(ended ?? last) - x(began) - 0.8, 0.6).toFixed(1);
    boxes.push(`M${from} ${y}h${width}v${height}H${from}z`);
  }
  return boxes.join("");
}

/** Recoveries close to each other share a mark: [{ x, all }]. */
export function marks(recoveries, x, [from, until]) {
  const found = [];
  for (const one of recoveries) {
    if (one.wall < from || one.wall > until) continue;
    const at = x(one.wall);
    if (found.length && at - found.at(-1).x < NEAR) found.at(-1).all.push(one);
    else found.push({ x: at, all: [one] });
  }
  return found;
}

const WEEK = 604800;
const STEPS = [
  ...[1, 2, 5, 10, 15, 30],
  ...[1, 2, 5, 10, 15, 30].map((minutes) => minutes * 60),
  ...[1, 2, 3, 6, 12, 24, 48].map((hours) => hours * 3600),
  WEEK,
];

/** Times for the axis: round ones on the local clock, no more than fit. */
export function ticks([from, until], width, room = 84) {
  const least = ((until - from) * room) / Math.max(width, 1);
  const step = STEPS.find((one) => one >= least) ?? Math.ceil(least / WEEK) * WEEK;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((from - shift) / step) * step + shift;
  const found = [];
  for (let at = first; at <= until; at += step) found.push(at);
  return { step, at: found };
}
