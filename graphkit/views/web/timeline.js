// The replay as it ran: a row per branch, a bar per node, and the gaps below.
const [AXIS, LANE, BAR, GAPS] = [20, 24, 20, 12];
const replay = { graph: null, bars: [], rects: new Map(), zoom: 1, current: -1 };

// Returns round times from begin to end, about as many as ``count``.
function ticks(begin, end, count) {
  const least = (end - begin) / count;
  if (!(least > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * ([1, 2, 5].find((each) => each * power >= least) || 10);
  const first = Math.ceil(begin / step);
  return Array.from({ length: Math.floor(end / step) - first + 1 }, (_, at) => (first + at) * step);
}

// Returns as much of a name as fits, or nothing.
function label(name, width) {
  const most = Math.floor((width - 6) / 6.7);
  if (most < 4) return "";
  return name.length <= most ? name : `${name.slice(0, most - 1)}\u2026`;
}

// Returns where the text of a tick is: behind the tick, or before it where the edge would cut it.
function tickText(x, text, left, right) {
  const width = 3 + 6.7 * text.length;
  if (x + width <= right) return { x: x + 3, "text-anchor": "start" };
  return x - width >= left ? { x: x - 3, "text-anchor": "end" } : null;
}

function showReplay(graph) {
  const { bars, branches } = graph;
  Object.assign(replay, { graph, bars, rects: new Map(), current: -1 });
  for (const id of ["replay", "replay-note", "replay-keys", "zoom"]) $(id).hidden = !bars.length;
  $("at").textContent = "";
  $("replay-title").textContent = `Timeline of a replay of ${graph.title}`;
  $("replay-sum").textContent = graph.summary;
  $("parts").replaceChildren(...graph.parts.map(([part, text]) => make("li", {},
    make("span", { class: `swatch part-${part}`, "aria-hidden": "true" }), text)));
  const below = AXIS + branches * LANE;
  const names = Array.from({ length: branches }, (_, at) => `branch ${at + 1}`);
  $("branches").replaceChildren(...["us", ...names, "gaps"].map((name) => make("span", {}, name)));
  $("bars").style.height = `${below + GAPS}px`;
  $("bars").replaceChildren(
    ...bars.filter(({ gap }) => gap).map(({ begin, gap }) =>
      rect(begin - gap, gap, below, GAPS - 2, { class: "gap" })),
    ...bars.map(bar), draw("g", { id: "labels", "aria-hidden": "true" }));
  zoomTo(1, 0);
}

// At least a pixel wide, and a pixel short of its end, so that bars of one colour are apart.
function rect(start, time, y, height, facts) {
  const share = (value) => `${100 * value / replay.graph.end}%`;
  const style = `width:max(1px,${share(time)} - 1px)`;
  return draw("rect", { ...facts, x: share(start), y, height, style });
}

function bar(node, at) {
  const facts = { class: `part-${node.part}`, "data-at": at };
  const made = rect(node.begin, node.us, AXIS + node.lane * LANE, BAR, facts);
  replay.rects.set(node, made);
  return made;
}

// Draws the times and the names of what is in view.
function drawLabels() {
  const view = $("view");
  const [left, right] = [view.scrollLeft, view.scrollLeft + view.clientWidth];
  const scale = view.clientWidth * replay.zoom / replay.graph.end;
  const times = ticks(left / scale, right / scale, Math.max(view.clientWidth / 110, 1));
  const texts = times.flatMap((time) => {
    const text = time.toLocaleString("en", { maximumFractionDigits: 3 });
    const place = tickText(time * scale, text, left, right);
    return place ? [draw("text", { ...place, y: AXIS - 7 }, text)] : [];
  });
  const lines = times.map((time) =>
    draw("line", { x1: time * scale, x2: time * scale, y1: 2, y2: AXIS - 3 }));
  for (const node of replay.bars) {
    const begin = Math.max(node.begin * scale, left);
    const end = Math.min((node.begin + node.us) * scale, right);
    const text = end - begin > 24 ? label(node.name, end - begin) : "";
    if (text) texts.push(draw("text", { class: "name", x: begin + 4,
      y: AXIS + node.lane * LANE + 14 }, text));
  }
  $("labels").replaceChildren(...lines, ...texts);
}

function say(node) {
  $("at").textContent = `#${node.index} ${node.name}: ${us(node.us)} us from ` +
    `${us(node.begin)} us, ${node.part}, branch ${node.lane + 1}`;
}

// Makes a bar the current one, and pans to it.
function point(at) {
  const node = replay.bars[at];
  if (!node) return;
  replay.current = at;
  for (const rect of $("bars").querySelectorAll("[data-current]")) rect.removeAttribute("data-current");
  replay.rects.get(node).dataset.current = "";
  const view = $("view");
  const scale = view.clientWidth * replay.zoom / replay.graph.end;
  const [begin, end] = [node.begin * scale, (node.begin + node.us) * scale];
  if (begin < view.scrollLeft || end > view.scrollLeft + view.clientWidth) {
    view.scrollLeft = begin - view.clientWidth / 3;
  }
  say(node);
}

function markBar(node) {
  for (const rect of $("bars").querySelectorAll("[data-open]")) rect.removeAttribute("data-open");
  if (!replay.rects.has(node)) return;
  replay.rects.get(node).dataset.open = "";
  point(replay.bars.indexOf(node));
}

function dimBars(found) {
  for (const [node, rect] of replay.rects) rect.classList.toggle("out", !found.has(node));
}
