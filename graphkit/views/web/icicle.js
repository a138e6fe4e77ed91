// Time by module as nested frames. A click zooms into a module; the path above leads back.
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
    const left = (frame.begin - frames[root].begin) / whole;
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

// Gives each frame the part of all its nodes, or null if they have several.
function colourFrames(graph) {
  for (const node of graph.nodes) {
    for (const at of pathTo(graph.frames, node.frame)) {
      const frame = graph.frames[at];
      frame.part = [undefined, node.part].includes(frame.part) ? node.part : null;
    }
  }
}

function showIcicle(graph) {
  Object.assign(icicle, { graph, root: 0 });
  colourFrames(graph);
  drawIcicle();
}

const nameOf = (frame) => frame.parent === null ? icicle.graph.title : frame.name;

function textOf(frame) {
  const whole = icicle.graph.us;
  const time = isNumber(frame.us) ? `${us(frame.us)} us` : "not measured";
  const share = whole > 0 && isNumber(frame.us) ? `, ${percent(frame.us / whole)}` : "";
  return `${frame.path || icicle.graph.title}: ${time}${share}, ${counted(frame.num_nodes, "node")}`;
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
    onclick: () => enter(at) }, nameOf(graph.frames[at])))));
  markFrames(state.open);
}

function frameButton({ at, depth, left, width }) {
  const frame = icicle.graph.frames[at];
  const isOne = typeof frame.part === "string";
  const colour = isOne ? colourOf(frame.part) : "";
  const made = make("button", { type: "button", role: "treeitem", class: `frame ${colour}`,
    tabindex: -1, title: textOf(frame), "aria-label": textOf(frame), "aria-level": depth + 1,
    "aria-selected": at === icicle.root ? "true" : "false", "data-at": at,
    onclick: () => enter(at === icicle.root && frame.parent !== null ? frame.parent : at) },
    nameOf(frame));
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
