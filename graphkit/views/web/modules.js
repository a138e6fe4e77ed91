// Modules: as nested frames, into which a click zooms, and as a tree of rows.
const LEAST = 1 / 500;
const ROW = 24;
const icicle = { graph: null, root: 0, buttons: new Map() };

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

function showIcicle(graph) {
  Object.assign(icicle, { graph, root: 0 });
  drawIcicle();
}

function drawIcicle() {
  const { graph, root } = icicle;
  const shown = placed(graph.frames, root);
  const rows = 1 + shown.reduce((most, { depth }) => Math.max(most, depth), 0);
  icicle.buttons = new Map(shown.map((place) => [place.at, frameButton(place)]));
  $("icicle").style.height = `${rows * ROW}px`;
  $("icicle").replaceChildren(...icicle.buttons.values());
  icicle.buttons.get(root).tabIndex = 0;
  const path = pathTo(graph.frames, root);
  $("crumbs").replaceChildren(...path.map((at) => make("li", {}, make("button", {
    type: "button", "aria-current": at === root ? "location" : undefined,
    onclick: () => enter(at) }, graph.frames[at].name))));
  markFrames(state.open);
}

function frameButton({ at, depth, left, width }) {
  const { name, text, part, parent } = icicle.graph.frames[at];
  const made = make("button", { type: "button", role: "treeitem",
    class: part ? `frame part-${part}` : "frame",
    tabindex: -1, title: text, "aria-label": text, "aria-level": depth + 1,
    "aria-selected": at === icicle.root ? "true" : "false", "data-at": at,
    onclick: () => enter(at === icicle.root && parent !== null ? parent : at) }, name);
  Object.assign(made.style, { left: `${100 * left}%`, width: `${100 * width}%`,
    top: `${depth * ROW}px` });
  return made;
}

// Zooms into a frame.
function enter(at) {
  icicle.root = at;
  drawIcicle();
  icicle.buttons.get(at).focus();
}

function markFrames(node) {
  const { graph, buttons } = icicle;
  const open = new Set(node && node.graph === graph ? pathTo(graph.frames, node.frame) : []);
  for (const [at, button] of buttons) button.toggleAttribute("data-open", open.has(at));
}

// Returns the frame that an arrow leads to: up and down in depth, left and right beside.
function neighbour(shown, frames, at, key) {
  const here = shown.find((place) => place.at === at);
  if (key === "ArrowUp") return shown.find((place) => place.at === frames[at].parent);
  if (key === "ArrowDown") return shown.find((place) => frames[place.at].parent === at);
  const row = shown.filter((place) => place.depth === here.depth);
  return row[row.indexOf(here) + (key === "ArrowRight" ? 1 : -1)];
}

function pressIcicle(event) {
  const { graph, root, buttons } = icicle;
  const { parent } = graph.frames[root];
  if (event.key === "Escape" && parent !== null) enter(parent);
  if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
  const at = Number(event.target.dataset.at);
  const next = neighbour(placed(graph.frames, root), graph.frames, at, event.key);
  if (!next) return;
  buttons.get(at).tabIndex = -1;
  buttons.get(next.at).tabIndex = 0;
  buttons.get(next.at).focus();
}

// Numbers and bars are in columns of their own; a name is indented by its depth.
function treeRow(tag, name, time, share, depth, facts = {}) {
  const made = make(tag, { class: "row", title: name, ...facts },
    make("span", { class: "us" }, time), shareBar(share),
    make("span", { class: "name" }, ...breakable(name)));
  made.style.setProperty("--depth", depth);
  return made;
}

// The rows inside of a module are made when it is opened.
function branch({ name, time, share, isOpen, rows }, depth, graph) {
  const made = make("details", {}, treeRow("summary", name, time, share, depth));
  const fill = () => made.childElementCount === 1 &&
    made.append(...rows.map((row) => treeEntry(row, depth + 1, graph)));
  made.addEventListener("toggle", fill);
  if (isOpen) {
    fill();
    made.open = true;
  }
  return made;
}

function treeEntry(row, depth, graph) {
  const { node } = row;
  return node ? treeRow("button", node.name, us(node.us), graph.us ? node.us / graph.us : 0, depth,
    { type: "button", onclick: () => showNode(node) }) : branch(row, depth, graph);
}

function showTree() {
  const isOpen = state.graphs.length === 1;
  $("tree").replaceChildren(...state.graphs.map((graph) => branch({ name: graph.title,
    time: us(graph.us), share: graph.us ? 1 : 0, isOpen, rows: graph.tree }, 0, graph)));
  $("totals").replaceChildren(...(isOpen ? state.graphs[0].facts : []).map((fact) =>
    make("div", {}, ...list([fact]))));
}
