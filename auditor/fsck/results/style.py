"""The report's CSS: light or dark as the reader's system, readable on a phone. Loads nothing from
the network."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2126; --soft: #5b6570; --line: #d9dee3; --card: #f5f7f9;
  --lost: #b3123b; --at_risk: #d9480f; --degraded: #b58100; --unknown: #6b7684; --whole: #2b8a3e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181c; --ink: #e6eaee; --soft: #9aa5b1; --line: #313941; --card: #1d2329;
    --lost: #ff6b8b; --at_risk: #ff922b; --degraded: #ffd43b; --unknown: #98a4b0; --whole: #51cf66;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; }
.soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .5rem; margin: 1rem 0; padding: 0; }
.card { background: var(--card); border-left: .3rem solid var(--line); border-radius: .3rem; padding: .5rem .75rem; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.none { opacity: .55; }
.lost { --hue: var(--lost); } .at_risk { --hue: var(--at_risk); } .degraded { --hue: var(--degraded); }
.unknown { --hue: var(--unknown); } .whole { --hue: var(--whole); } .told { --hue: var(--at_risk); }
.card.lost, .card.at_risk, .card.degraded, .card.unknown, .card.whole { border-left-color: var(--hue); }
rect { fill: var(--hue, var(--line)); }
svg { display: block; width: 100%; height: 1rem; border-radius: .2rem; background: var(--card); }
svg.tall { height: 1.75rem; }
.tag { color: var(--hue); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td { text-align: left; padding: .35rem .5rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.plot { width: 35%; vertical-align: middle; }
td > code { display: inline-block; min-width: 9rem; }
.scroll { overflow-x: auto; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
details details { margin-left: 1rem; }
summary { cursor: pointer; }
code, pre { font: .875rem/1.45 ui-monospace, monospace; }
pre { background: var(--card); padding: .75rem; border-radius: .3rem; overflow-x: auto; }
li { margin: .4rem 0; }
@media (max-width: 36rem) { td.plot { width: 28%; } body { font-size: 15px; } }
@media print { details > * { display: block; } body { max-width: none; } }
""".strip()
