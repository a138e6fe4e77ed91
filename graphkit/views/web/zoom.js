// Zoom and pan of the timeline by keys, wheel and touch.
// Returns the scroll position at which the point ``at`` pixels from the left keeps its time.
const zoomedScroll = (scroll, at, factor) => (scroll + at) * factor - at;

// Zooms; the point ``at`` pixels from the left of the view keeps its time.
function zoomTo(zoom, at = $("view").clientWidth / 2) {
  const view = $("view");
  const width = view.clientWidth || 1;
  const most = clamped(200 * replay.graph.end / width, 1, 4e6 / width);
  const next = clamped(zoom, 1, most);
  const scroll = zoomedScroll(view.scrollLeft, at, next / replay.zoom);
  replay.zoom = next;
  $("bars").style.width = `${100 * next}%`;
  view.scrollLeft = next === 1 ? 0 : scroll;
  drawLabels();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const pan = (share) => () => { $("view").scrollLeft += share * $("view").clientWidth; };
  const last = replay.bars.length - 1;
  const act = {
    "+": () => zoomTo(1.5 * replay.zoom), "=": () => zoomTo(1.5 * replay.zoom),
    "-": () => zoomTo(replay.zoom / 1.5), "0": () => zoomTo(1),
    ArrowLeft: pan(-0.2), ArrowRight: pan(0.2),
    ArrowUp: () => point(Math.max(replay.current - 1, 0)),
    ArrowDown: () => point(Math.min(replay.current + 1, last)),
    Home: () => point(0), End: () => point(last),
    Enter: () => replay.current >= 0 && showNode(replay.bars[replay.current]),
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

// One finger pans, as in any scrolled box; two zoom.
function pinch() {
  let before = 0;
  const spread = ([one, other]) =>
    Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY) || 1;
  $("view").addEventListener("touchstart", (event) => {
    if (event.touches.length === 2) before = spread(event.touches);
  }, { passive: true });
  $("view").addEventListener("touchmove", (event) => {
    if (event.touches.length !== 2) return;
    event.preventDefault();
    const [now, left] = [spread(event.touches), $("view").getBoundingClientRect().left];
    const middle = (event.touches[0].clientX + event.touches[1].clientX) / 2;
    zoomTo(replay.zoom * now / before, middle - left);
    before = now;
  }, { passive: false });
}

function startReplay() {
  const node = ({ target }) => replay.bars[target.dataset.at];
  $("bars").addEventListener("click", (event) => node(event) && showNode(node(event)));
  $("bars").addEventListener("pointerover", (event) => node(event) && say(node(event)));
  $("view").addEventListener("keydown", press);
  $("view").addEventListener("wheel", wheel, { passive: false });
  $("view").addEventListener("scroll", () => requestAnimationFrame(drawLabels), { passive: true });
  new ResizeObserver(() => replay.graph && zoomTo(replay.zoom)).observe($("view"));
  pinch();
  $("zoom-in").addEventListener("click", () => zoomTo(1.5 * replay.zoom));
  $("zoom-out").addEventListener("click", () => zoomTo(replay.zoom / 1.5));
  $("zoom-all").addEventListener("click", () => zoomTo(1));
}
