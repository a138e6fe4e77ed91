// The details of one node.
function showNode(node) {
  if ($("details").hidden) state.opener = document.activeElement;
  const pressed = $("details").contains(document.activeElement) && document.activeElement.textContent;
  const button = (text, onclick) => make("button", { type: "button", class: "plain", onclick }, text);
  const beside = (step) => () => showNode(state.found[state.found.indexOf(node) + step] || node);
  const close = () => {
    $("details").hidden = true;
    mark(null);
    if (state.opener.isConnected) state.opener.focus();
  };
  $("details").replaceChildren(
    make("header", {}, make("h2", {}, `#${node.index} ${node.short_name}`),
      button("previous", beside(-1)), button("next", beside(1)), button("close", close)),
    make("dl", {}, ...list(factsOf(node))), ...argumentsOf(node));
  $("details").onkeydown = (event) => event.key === "Escape" && close();
  $("details").hidden = false;
  $("details").scrollTop = 0;
  const buttons = [...$("details").querySelectorAll("header button")];
  (buttons.find((each) => each.textContent === pressed) || buttons.at(-1)).focus();
  mark(node);
}

// Marks a node in every view.
function mark(node) {
  state.open = node;
  markRow(node);
  markBar(node);
  markFrames(node);
}

function factsOf(node) {
  const ends = (edges, end) => edges.flatMap((edge) => {
    const other = node.graph.known.get(edge[end]);
    const kind = edge.kind && edge.kind !== "full" ? ` (${edge.kind})` : "";
    return other ? [make("button", { type: "button", onclick: () => showNode(other) },
      `#${other.index} ${other.short_name}${kind}`), make("br")] : [];
  });
  const edges = node.graph.edges || [];
  return [
    ["graph", node.graph.title], ["kind", node.kind], ["name", make("code", {}, node.name)],
    ["module", node.path], ["op", node.op], ["source", node.source], ["scope", node.scope],
    ["inside of", node.holder && `#${node.holder.index} ${node.holder.short_name}`],
    ["time", isNumber(node.duration_us)
      ? `${us(node.duration_us)} us, from ${us(node.start_us)} us` : "not measured"],
    ["grid", extent(node.grid)], ["block", extent(node.block)], ["cluster", extent(node.cluster)],
    ["shared memory", node.shared_memory_bytes && size(node.shared_memory_bytes)],
    ["registers", node.registers && String(node.registers)],
    ...Object.entries(node.attributes || {}),
    ["waits for", ends(edges.filter((edge) => edge.target === node.index), "source")],
    ["before", ends(edges.filter((edge) => edge.source === node.index), "target")],
  ].filter(([, fact]) => !Array.isArray(fact) || fact.length);
}

function argumentsOf(node) {
  if (!node.arguments) return [];
  const rows = node.arguments.map((argument, place) => make("tr", {},
    ...[argument.name || String(place), String(argument.offset || 0), String(argument.size),
      argument.kind].map((text) => make("td", {}, text)),
    make("td", {}, ...valueOf(argument).flatMap((line, i) => i ? [make("br"), line] : [line]))));
  const heads = ["argument", "offset", "bytes", "kind", "value"];
  return [make("table", {}, make("thead", {}, make("tr", {},
    ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows))];
}

function valueOf(argument) {
  const pointers = argument.pointers || [];
  const lines = pointers.map((pointer) =>
    `${pointers.length > 1 || pointer.offset ? `+${pointer.offset || 0}: ` : ""}${hex(pointer.address)} ` +
    `${pointer.memory} ${pointer.name}`);
  return argument.kind === "pointer" && lines.length ? lines : [argument.text, ...lines];
}
