const plan = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg", LEFT = 52, TALL = 320, SHORT = 120;
const ranks = plan.nodes[plan.nodes.length - 1][1];
const tip = document.getElementById("tip"), panels = document.getElementById("panels");
const room = Math.max(640, panels.clientWidth) - LEFT - 10;  // narrower windows scroll
const pitch = Math.max(3, Math.min(36, room / ranks)), width = LEFT + pitch * ranks + 10;
document.documentElement.style.setProperty("--edge", pitch > 10 ? 0.5 : 0);

function element(parent, name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return parent.appendChild(made);
}

function panel(heading, rank, base, top, height) {
  const title = document.createElement("h2"), scroll = document.createElement("div");
  title.textContent = heading; scroll.className = "wide";
  panels.append(title, scroll);
  const svg = element(scroll, "svg", { width: width, height: height + 34, role: "img", "aria-label": heading });
  const y = value => height - value / top * (height - 10);
  plan.nodes.forEach(([first, stop], node) => {
    if (node % 2) element(svg, "rect", { x: LEFT + first * pitch, y: 0, width: (stop - first) * pitch, height: height, class: "band" });
    if (plan.nodes.length > 1 && (stop - first) * pitch > 44)
      element(svg, "text", { x: LEFT + first * pitch + 4, y: height + 28 }).textContent = "node " + node;
  });
  const step = 10 ** Math.floor(Math.log10(top)), tick = top / step > 5 ? step * 2 : top / step > 2 ? step : step / 2;
  for (let value = 0; value <= top; value += tick) {
    element(svg, "line", { x1: LEFT, x2: width, y1: y(value), y2: y(value), class: "axis" });
    element(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }).textContent = +value.toPrecision(3) + " ms";
  }
  const every = Math.ceil(26 / pitch);
  for (let r = 0; r < ranks; r += every)
    element(svg, "text", { x: LEFT + (r + .5) * pitch, y: height + 14, "text-anchor": "middle" }).textContent = r;
  plan.seq.forEach((seq, i) => {
    const block = element(svg, "rect", {
      x: LEFT + rank[i] * pitch + pitch * .08, y: y(base[i] + plan.height[i]), width: pitch * .84,
      height: plan.height[i] / top * (height - 10), fill: plan.colour[seq],
      class: "block s" + seq + (plan.attention[i] ? "" : " tokens") });
    block.dataset.i = i;
  });
  element(svg, "line", { x1: LEFT, x2: width, y1: y(plan.bound), y2: y(plan.bound), class: "bound" });
  return svg;
}

const tops = [plan.home_base, plan.base].map(base => Math.max(plan.bound, ...base.map((b, i) => b + plan.height[i])) * 1.04 || 1);
const heights = tops.map(top => Math.max(SHORT, TALL * top / Math.max(...tops)));  // one scale, unless a panel would be too low
const views = [panel(plan.headings[0], plan.home, plan.home_base, tops[0], heights[0]),
               panel(plan.headings[1], plan.rank, plan.base, tops[1], heights[1])];

let kept = null;
function focus(seq) {
  for (const svg of views) {
    svg.querySelectorAll(".on").forEach(block => block.classList.remove("on"));
    svg.classList.toggle("focus", seq !== null);
    if (seq !== null) svg.querySelectorAll(".s" + seq).forEach(block => block.classList.add("on"));
  }
}
function describe(i) {
  const seq = plan.seq[i], whole = plan.length[seq], text = plan.text_length[seq];
  const share = plan.attention[i]
    ? "attention rows " + plan.start[i] + " to " + plan.stop[i] + " of " + whole * plan.heads
    : "tokens " + plan.start[i] + " to " + plan.stop[i] + " of " + whole;
  const holders = new Set(plan.seq.flatMap((s, j) => s === seq ? [plan.rank[j]] : []));
  return "sequence " + seq + ": " + whole + " tokens" + (text ? " (" + text + " text)" : "") + ", home rank " + plan.home[i]
    + "\n" + share + " on rank " + plan.rank[i] + ": " + +plan.height[i].toPrecision(4) + " ms"
    + "\n" + (plan.split[seq]
      ? "split over ranks " + [...holders].sort((a, b) => a - b).join(", ") + "; " + (plan.traffic[seq] / 1e6).toFixed(1) + " MB cross ranks per layer"
      : "whole on rank " + plan.rank[i] + (plan.rank[i] === plan.home[i] ? ", where it was loaded" : ""));
}
panels.addEventListener("mousemove", event => {
  const i = event.target.dataset ? event.target.dataset.i : undefined;
  if (i === undefined) { tip.style.display = "none"; focus(kept); return; }
  tip.textContent = describe(+i);
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  focus(kept === null ? plan.seq[i] : kept);
});
panels.addEventListener("mouseleave", () => { tip.style.display = "none"; focus(kept); });
panels.addEventListener("click", event => { const i = event.target.dataset.i; kept = i === undefined ? null : plan.seq[i]; focus(kept); });
addEventListener("keydown", event => { if (event.key === "Escape") { kept = null; focus(null); } });
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});

document.documentElement.dataset.ready = "yes";
