// The cost by kernel; a kernel selects its nodes.
function showKernels() {
  $("kernels").replaceChildren(...state.graphs.map(kernelTable));
  markKernel();
}

// Shows the nodes of one kernel alone, or those of all if it is chosen already.
function chooseKernel(kernel) {
  state.kernel = kernel && state.kernel && kernel.key === state.kernel.key ? null : kernel;
  markKernel();
  find();
}

function markKernel() {
  for (const kernel of state.graphs.flatMap((graph) => graph.kernels)) {
    const isChosen = state.kernel !== null && kernel.key === state.kernel.key;
    kernel.button.setAttribute("aria-pressed", isChosen);
    kernel.row.toggleAttribute("data-open", isChosen);
  }
  $("all").hidden = state.kernel === null;
}

function kernelTable(graph) {
  const heads = ["kernel", "nodes", "us", "share", "mean us", "modules"];
  const numbers = heads.slice(1, 5);
  return make("table", {},
    state.graphs.length > 1 ? make("caption", {}, graph.title) : "",
    make("thead", {}, make("tr", {}, ...heads.map((head) =>
      make("th", { scope: "col", class: numbers.includes(head) ? "number" : "" }, head)))),
    make("tbody", {}, ...graph.kernels.map(kernelRow)));
}

function kernelRow(kernel) {
  const number = (...children) => make("td", { class: "number" }, ...children);
  kernel.button = make("button", { type: "button", title: kernel.note,
    onclick: () => chooseKernel(kernel) }, kernel.name);
  kernel.row = make("tr", {}, make("td", {}, kernel.button),
    number(kernel.nodes.toLocaleString("en")), number(us(kernel.us)),
    number(shareBar(kernel.share), percent(kernel.share)), number(us(kernel["mean us"])),
    make("td", { class: "modules" }, modulesOf(kernel)));
  return kernel.row;
}

function modulesOf({ modules }) {
  const names = modules.join(", ");
  return modules.length <= 3 ? names
    : make("details", {}, make("summary", {}, `${modules[0]} and ${modules.length - 1} more`), names);
}
