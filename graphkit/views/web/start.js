// The start of the page.
function choose() {
  const chosen = $("graph").value;
  state.graphs = chosen === "all" ? page : [page[Number(chosen)]];
  state.kernel = null;
  $("charts").hidden = state.graphs.length !== 1;
  if (state.graphs.length === 1) {
    showReplay(state.graphs[0]);
    showIcicle(state.graphs[0]);
  }
  showTree();
  showKernels();
  find();
}

function start() {
  if (page.length !== 1) $("graph").append(make("option", { value: "all" }, "all graphs"));
  page.forEach((graph, at) => $("graph").append(make("option", { value: at }, graph.title)));
  if (page.length) $("graph").value = $("graph").dataset.first;
  $("graph").addEventListener("change", choose);
  $("search").addEventListener("input", find);
  $("all").addEventListener("click", () => { chooseKernel(null); $("search").focus(); });
  $("more").addEventListener("click", () => { state.shown += STEP; showTable(); });
  $("save").addEventListener("click", save);
  $("icicle").addEventListener("keydown", pressIcicle);
  $("page").hidden = false;
  startReplay();
  choose();
  later.catch(fail);
}

start();
