// The charts, which are the timeline of a replay and its modules as nested frames; and the start.
const [AXIS, LANE, BAR, GAPS, ROW] = [20, 24, 20, 12, 24];
const LEAST = 1 / 500;
const replay = { rects: new Map(), zoom: 1, current: -1 };
const icicle = { root: 0, buttons: new Map() };

// Returns round times from begin to end, about as many as ``count``.
function ticks(begin, end, count) {
  const least = (end - begin) / count;
  if (!(least > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= least) || 10);
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

// Returns the scroll position at which the point ``at`` pixels from the left keeps its time.
const zoomedScroll = (scroll, at, factor) => (scroll + at) * factor - at;
const clamped = (value, least, most) => Math.min(Math.max(value, least), most);

function showReplay({ bars, branches, title, summary, parts }) {
  Object.assign(replay, { rects: new Map(), current: -1 });
  for (const id of ["replay", "replay-note", "replay-keys", "zoom"]) $(id).hidden = !bars.length;
  $("at").textContent = "";
  $("replay-title").textContent = `Timeline of a replay of ${title}`;
  $("replay-sum").textContent = summary;
  $("parts").replaceChildren(...parts.map(([part, text]) => make("li", {},
    make("span", { class: `swatch part-${part}`, "aria-hidden": "true" }), text)));
  const below = AXIS + branches * LANE;
  const names = Array.from({ length: branches }, (_, at) => `branch ${at + 1}`);
  $("branches").replaceChildren(...["us", ...names, "gaps"].map((name) => make("span", {}, name)));
  $("bars").style.height = `${below + GAPS}px`;
  $("bars").replaceChildren(
    ...bars.filter(({ gap }) => gap).map(({ begin, gap }) =>
      rect(begin - gap, gap, below, GAPS - 2, { class: "gap" })),
    ...bars.map((node, at) => {
      const facts = { class: `part-${node.part}`, "data-at": at };
      replay.rects.set(node, rect(node.begin, node.us, AXIS + node.lane * LANE, BAR, facts));
      return replay.rects.get(node);
    }), draw("g", { id: "labels", "aria-hidden": "true" }));
  zoomTo(1, 0);
}

// At least a pixel wide, and a pixel short of its end, so that bars of one colour are apart.
function rect(start, time, y, height, facts) {
  const share = (value) => `${100 * value / state.graph.end}%`;
  const style = `width:max(1px,${share(time)} - 1px)`;
  return draw("rect", { ...facts, x: share(start), y, height, style });
}

// Draws the times and the names of what is in view.
function drawLabels() {
  const view = $("view");
  const [left, right] = [view.scrollLeft, view.scrollLeft + view.clientWidth];
  const scale = view.clientWidth * replay.zoom / state.graph.end;
  const times = ticks(left / scale, right / scale, Math.max(view.clientWidth / 110, 1));
  const texts = times.flatMap((time) => {
    const text = time.toLocaleString("en", { maximumFractionDigits: 3 });
    const place = tickText(time * scale, text, left, right);
    return place ? [draw("text", { ...place, y: AXIS - 7 }, text)] : [];
  });
  const lines = times.map((time) =>
    draw("line", { x1: time * scale, x2: time * scale, y1: 2, y2: AXIS - 3 }));
  for (const node of state.graph.bars) {
    const begin = Math.max(node.begin * scale, left);
    const end = Math.min((node.begin + node.us) * scale, right);
    const text = end - begin > 24 ? label(node.name, end - begin) : "";
    if (text) texts.push(draw("text", { class: "name", x: begin + 4,
      y: AXIS + node.lane * LANE + 14 }, text));
  }
  $("labels").replaceChildren(...lines, ...texts);
}

// Zooms; the point ``at`` pixels from the left of the view keeps its time.
function zoomTo(zoom, at = $("view").clientWidth / 2) {
  const view = $("view");
  const width = view.clientWidth || 1;
  const most = clamped(200 * state.graph.end / width, 1, 4e6 / width);
  const next = clamped(zoom, 1, most);
  const scroll = zoomedScroll(view.scrollLeft, at, next / replay.zoom);
  replay.zoom = next;
  $("bars").style.width = `${100 * next}%`;
  view.scrollLeft = next === 1 ? 0 : scroll;
  drawLabels();
}

function say(node) {
  $("at").textContent = `#${node.index} ${node.name}: ${us(node.us)} us from ` +
    `${us(node.begin)} us, ${node.part}, branch ${node.lane + 1}`;
}

// Makes a bar the current one, and pans to it.
function point(at) {
  const node = state.graph.bars[at];
  if (!node) return;
  replay.current = at;
  for (const one of $("bars").querySelectorAll("[data-current]")) one.removeAttribute("data-current");
  replay.rects.get(node).dataset.current = "";
  const view = $("view");
  const scale = view.clientWidth * replay.zoom / state.graph.end;
  const [begin, end] = [node.begin * scale, (node.begin + node.us) * scale];
  if (begin < view.scrollLeft || end > view.scrollLeft + view.clientWidth) {
    view.scrollLeft = begin - view.clientWidth / 3;
  }
  say(node);
}

function markBar(node) {
  for (const one of $("bars").querySelectorAll("[data-open]")) one.removeAttribute("data-open");
  if (!replay.rects.has(node)) return;
  replay.rects.get(node).dataset.open = "";
  point(state.graph.bars.indexOf(node));
}

function dimBars(found) {
  for (const [node, one] of replay.rects) one.classList.toggle("out", !found.has(node));
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const pan = (share) => () => { $("view").scrollLeft += share * $("view").clientWidth; };
  const { bars } = state.graph;
  const act = {
    "+": () => zoomTo(1.5 * replay.zoom), "=": () => zoomTo(1.5 * replay.zoom),
    "-": () => zoomTo(replay.zoom / 1.5), "0": () => zoomTo(1),
    ArrowLeft: pan(-0.2), ArrowRight: pan(0.2),
    ArrowUp: () => point(Math.max(replay.current - 1, 0)),
    ArrowDown: () => point(Math.min(replay.current + 1, bars.length - 1)),
    Enter: () => replay.current >= 0 && showNode(bars[replay.current]),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function wheel(event) {
  const isZoom = event.ctrlKey || event.metaKey || document.activeElement === $("view");
  if (!isZoom || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
  event.preventDefault();
  const at = event.clientX - $("view").getBoundingClientRect().left;
  zoomTo(replay.zoom * Math.exp(-clamped(event.deltaY, -100, 100) / 300), at);
}

// Returns the modules of a graph as nested frames, and gives each node its frame. Modules of one
// name share a frame, and so do layers of equal kernels; the width of a frame is its time.
function moduleFrames({ title, tree, us: whole }) {
  const frames = [];
  const nodesOf = (row) => row.rows ? row.rows.flatMap(nodesOf) : [row];
  const kernels = (row) => row.rows ? `${starred(row.name)}(${row.rows.map(kernels)})`
    : `${row.name} ${row.grid}`;
  const likeness = (row) => starred(row.name) === row.name ? row.name : kernels(row);
  const add = (name, path, branches, parent, left, outer) => {
    const [at, nodes] = [frames.length, branches.flatMap(nodesOf)];
    const [time, parts] = [totalTime(nodes), new Set(nodes.map(({ part }) => part))];
    const share = time !== null && whole ? `, ${(100 * time / whole).toFixed(1)}%` : "";
    const frame = { parent, left, name: branches.length > outer ? `${name} (${branches.length} x)` : name,
      text: `${path || title}: ${time === null ? "not measured" : `${us(time)} us`}${share}, ` +
        `${nodes.length} node${nodes.length === 1 ? "" : "s"}`,
      part: parts.size === 1 && !parts.has("other") ? nodes[0].part : "" };
    frames.push(frame);
    for (const node of nodes) node.frame = at;
    const groups = new Map();
    for (const row of branches.flatMap(({ rows }) => rows).filter((row) => row.rows && !row.isRun)) {
      groups.set(likeness(row), [...groups.get(likeness(row)) || [], row]);
    }
    let inside = 0;
    for (const group of groups.values()) {
      const names = [...new Set(group.map((row) => row.name))];
      const label = names.length === 1 ? names[0] : starred(names[0]);
      inside += add(label, path ? `${path}.${label}` : label, group, at, left + inside, branches.length);
    }
    // A module inside of a measured child graph may take longer than what is around it.
    frame.width = Math.max(whole === null ? nodes.length : time || 0, inside);
    return frame.width;
  };
  const width = add(title, "", [{ rows: tree }], null, 0, 1) || 1;
  return frames.map((frame) => ({ ...frame, left: frame.left / width, width: frame.width / width }));
}

// Returns a path with a star for each number, which is equal for all layers.
const starred = (name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

// Returns the frames around and inside of one frame, with their place as shares of its width.
function placed(frames, root) {
  const around = new Set(pathTo(frames, root));
  const depths = [];
  const inside = new Set([root]);
  return frames.flatMap((frame, at) => {
    depths[at] = frame.parent === null ? 0 : depths[frame.parent] + 1;
    if (around.has(at)) return [{ at, depth: depths[at], left: 0, width: 1 }];
    if (!inside.has(frame.parent)) return [];
    inside.add(at);
    const whole = frames[root].width || 1;
    const left = (frame.left - frames[root].left) / whole;
    const width = frame.width / whole;
    return width < LEAST ? [] : [{ at, depth: depths[at], left, width }];
  });
}

// Returns a frame and those around it, the outermost first.
function pathTo(frames, at) {
  const path = [];
  for (; at !== null; at = frames[at].parent) path.unshift(at);
  return path;
}

// Draws a frame across the whole width, those around it above and those inside of it below.
function enter(root) {
  const { frames } = state.graph;
  const shown = placed(frames, root);
  icicle.root = root;
  icicle.buttons = new Map(shown.map((place) => [place.at, frameButton(place)]));
  $("icicle").style.height = `${ROW * (1 + Math.max(...shown.map(({ depth }) => depth)))}px`;
  $("icicle").replaceChildren(...icicle.buttons.values());
  $("crumbs").replaceChildren(...pathTo(frames, root).map((at) => make("li", {}, make("button", {
    type: "button", "aria-current": at === root ? "location" : undefined,
    onclick: () => enter(at) }, frames[at].name))));
  markFrames(state.open);
}

// Keys and readers have the crumbs and the tree, which has the same values.
function frameButton({ at, depth, left, width }) {
  const { name, text, part, parent } = state.graph.frames[at];
  const made = make("button", { type: "button", class: part ? `frame part-${part}` : "frame",
    tabindex: -1, title: text,
    onclick: () => enter(at === icicle.root && parent !== null ? parent : at) }, name);
  Object.assign(made.style, { left: `${100 * left}%`, width: `${100 * width}%`,
    top: `${depth * ROW}px` });
  return made;
}

function markFrames(node) {
  const open = new Set(node ? pathTo(state.graph.frames, node.frame) : []);
  for (const [at, button] of icicle.buttons) button.toggleAttribute("data-open", open.has(at));
}

// Returns the graph with nodes in place of their positions.
function linked(graph) {
  const { nodes } = graph;
  const branches = (rows) => rows.map((row) =>
    typeof row === "number" ? nodes[row] : { ...row, rows: branches(row.rows) });
  for (const node of nodes) {
    node.holder = nodes[node.holder];
    const texts = [...nodeCells(node), ...node.facts.map(([, text]) => text), ...node.arguments.flat()];
    node.words = texts.join(" ").toLowerCase();
  }
  for (const row of graph.kernels.rows) row.nodes = new Set(row.nodes.map((at) => nodes[at]));
  const tree = branches(graph.tree);
  return { ...graph, tree, frames: moduleFrames({ ...graph, tree }),
    edges: graph.edges.map(([source, target, kind]) =>
      ({ source: nodes[source], target: nodes[target], kind })),
    bars: graph.bars.map(([at, begin, gap, lane]) => Object.assign(nodes[at], { begin, gap, lane })) };
}

function choose(graph) {
  Object.assign(state, { graph, kernel: null, open: null });
  $("details").hidden = true;
  $("totals").replaceChildren(...graph.facts.map((fact) => make("div", {}, ...list([fact]))));
  $("tree").replaceChildren(branch({ name: graph.title, time: us(graph.us), share: graph.us ? 1 : 0,
    isOpen: true, rows: graph.tree }, 0));
  $("kernels-note").hidden = !graph.kernels.heads.includes("GB/s");
  $("kernels").replaceChildren(kernelTable(graph.kernels));
  showReplay(graph);
  enter(0);
  chooseKernel(null);
}

function save(record) {
  const address = URL.createObjectURL(new Blob([record], { type: "application/json" }));
  make("a", { href: address, download: `graphkit-${$("save").dataset.kind}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

async function start() {
  const packed = Uint8Array.from(atob($("data").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { record, graphs } = JSON.parse(await new Response(stream).text());
  const page = graphs.map(linked);
  const bar = ({ target }) => state.graph.bars[target.dataset.at];
  const on = (id, event, act, options) => $(id).addEventListener(event, act, options);
  page.forEach((graph, at) => $("graph").append(make("option", { value: at }, graph.title)));
  $("graph").value = $("graph").dataset.first;
  on("graph", "change", () => choose(page[Number($("graph").value)]));
  on("search", "input", find);
  on("all", "click", () => { chooseKernel(null); $("search").focus(); });
  on("more", "click", () => { state.shown += STEP; showTable(); });
  on("save", "click", () => save(record));
  on("bars", "click", (event) => bar(event) && showNode(bar(event)));
  on("bars", "pointerover", (event) => bar(event) && say(bar(event)));
  on("view", "keydown", press);
  on("view", "wheel", wheel, { passive: false });
  on("view", "scroll", () => requestAnimationFrame(drawLabels), { passive: true });
  on("zoom-in", "click", () => zoomTo(1.5 * replay.zoom));
  on("zoom-out", "click", () => zoomTo(replay.zoom / 1.5));
  on("zoom-all", "click", () => zoomTo(1));
  $("page").hidden = false;
  if (page.length) choose(page[$("graph").dataset.first]);
  new ResizeObserver(() => state.graph && zoomTo(replay.zoom)).observe($("view"));
}

start().catch((error) => {
  $("failure").textContent = `The page cannot be drawn: ${error.message}.`;
  $("failure").hidden = false;
});
