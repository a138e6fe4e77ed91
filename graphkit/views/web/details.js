// The panel of one node. Its facts and arguments are there as soon as they are unpacked.
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
    make("header", {}, make("h2", {}, `#${node.index} ${node.name}`),
      button("previous", beside(-1)), button("next", beside(1)), button("close", close)),
    make("dl", {}, ...list([["graph", node.graph.title], ...node.facts || [], ...relatedNodes(node)])),
    ...argumentTable(node.arguments || []));
  $("details").onkeydown = (event) => event.key === "Escape" && close();
  $("details").hidden = false;
  $("details").scrollTop = 0;
  const buttons = [...$("details").querySelectorAll("header button")];
  (buttons.find((each) => each.textContent === pressed) || buttons.at(-1)).focus();
  mark(node);
  if (!node.facts) later.then(() => state.open === node && showNode(node), fail);
}

// Marks a node in every view.
function mark(node) {
  state.open = node;
  markRow(node);
  markBar(node);
  markFrames(node);
}

// Names of relations to other nodes, and buttons that open these.
function relatedNodes(node) {
  const { edges } = node.graph;
  const opens = (other, kind = "") => [make("button", { type: "button",
    onclick: () => showNode(other) }, `#${other.index} ${other.name}${kind}`), make("br")];
  const before = edges.filter(({ target }) => target === node);
  const after = edges.filter(({ source }) => source === node);
  return [
    ["inside of", node.holder ? opens(node.holder) : []],
    ["waits for", before.flatMap(({ source, kind }) => opens(source, kind))],
    ["before", after.flatMap(({ target, kind }) => opens(target, kind))],
  ].filter(([, links]) => links.length);
}

function argumentTable(rows) {
  const heads = ["argument", "value", "kind", "offset", "bytes"];
  return rows.length ? [make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((cells) =>
      make("tr", {}, ...cells.map((text) => make("td", {}, text))))))] : [];
}
