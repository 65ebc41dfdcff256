"""What the page looks like, and the few lines by which charts answer a pointer."""

from __future__ import annotations

# Colours that stay apart for colour-blind eyes (Okabe and Ito 2008), lighter ones on a dark ground.
CSS = """
:root{--ground:#fff;--ink:#1b1b1b;--faint:#6b6b6b;--rule:#e3e3e3;--card:#fafafa;
--k0:#0072b2;--k1:#d55e00;--k2:#009e73;--k3:#cc79a7;--k4:#b8860b;--k5:#2f9bd8;--k6:#555;--k7:#8a2be2}
@media (prefers-color-scheme:dark){:root{--ground:#16181b;--ink:#e6e6e6;--faint:#a0a4a8;--rule:#33373b;--card:#1e2125;
--k0:#5ab4ee;--k1:#ff9a4d;--k2:#3ecf9f;--k3:#f0a3cc;--k4:#e6c84a;--k5:#9ad3f5;--k6:#b8b8b8;--k7:#c49bff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:90rem;background:var(--ground);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--rule)}h3{font-size:1rem}
.grid-of-charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr))}
figure{margin:0;padding:.6rem;background:var(--card);border:1px solid var(--rule);border-radius:6px;position:relative}
figcaption{font-weight:600;margin-bottom:.3rem}svg{width:100%;height:auto;display:block;touch-action:pan-y}
.wide{overflow-x:auto}table{border-collapse:collapse;overflow-wrap:normal}
th,td{text-align:left;padding:.15rem .9rem .15rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:500;color:var(--faint)}td{font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule)}.tick{fill:var(--faint);font-size:12px}.cursor{stroke:var(--faint)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.d1{stroke-dasharray:6 3}.d2{stroke-dasharray:2 3}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:13px;color:var(--faint)}.legend b{color:var(--ink)}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
output{position:absolute;top:.6rem;right:.6rem;background:var(--ground);border:1px solid var(--rule);border-radius:4px;
padding:.2rem .5rem;font-size:13px;white-space:pre;pointer-events:none}code{font-size:13px}
/* A phone shows a drawing at about half its size. */
@media (max-width:34rem){.tick{font-size:17px}body{padding:.6rem}}
""" + "".join(
    f".line.c{i}{{stroke:var(--k{i})}}.bar.c{i},.dot.c{i}{{fill:var(--k{i})}}.key.c{i}{{background:var(--k{i})}}\n"
    for i in range(8)
)

SCRIPT = """
"use strict";
for (const figure of document.querySelectorAll("figure[data-lines]")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const output = figure.querySelector("output");
  const hide = () => { output.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let nearest = null;
    const near = data.series.map(one => {
      const point = one.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      if (nearest === null || Math.abs(point[0] - at) < Math.abs(nearest[0] - at)) nearest = point;
      return [one.name, point];
    });
    if (nearest === null) return hide();
    cursor.setAttribute("x1", nearest[0]);
    cursor.setAttribute("x2", nearest[0]);
    cursor.setAttribute("visibility", "visible");
    const rows = near.filter(([, p]) => Math.abs(p[0] - nearest[0]) < 8).map(([name, p]) => name + "  " + p[3]);
    output.textContent = data.x + " " + Math.round(nearest[2] * 10) / 10 + "\\n" + rows.join("\\n");
    output.hidden = false;
  });
}
"""
