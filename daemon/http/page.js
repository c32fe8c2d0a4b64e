// Shows the state of the cluster, as the API of this node tells it. Everything from the cluster
// becomes text, never markup. The page is green only while the state that it shows is new.
"use strict";

const POLL_MS = 2_000, HIDDEN_MS = 30_000, RETRY_MAX_MS = 8_000, TIMEOUT_MS = 15_000;
const SILENT_MS = 3_000; // the page tells of a request that has no answer for longer
const OLD_MS = 5_000; // how much older than usual a state may be
const SLOW_EVERY = 5; // rounds between two readings of what changes seldom
const EVENTS_MAX = 60, NODES_MAX = 40, CARDS_MAX = 60, NAMES_MAX = 5, TEXT_MAX = 2_000;
const PATHS = {
  status: "api/v1/status",
  bookies: "api/v1/bookies",
  history: `api/v1/history?since=24h&limit=${EVENTS_MAX}`,
  node: "api/v1/node",
  checks: "api/v1/checks",
};
const QUICK = ["status", "bookies"];

// --- Reading --------------------------------------------------------------------------------------

// By name: the last good answer, its ETag, why there is no newer one, and when it was asked for.
const known = {}, tags = {}, failures = {}, asked = {};
let round = 0, failedRounds = 0, timer = null, isPolling = false;
let aheadMs = 0; // the node's clock is ahead of the browser's
let gapMs = POLL_MS; // between the last two states

const now = () => Date.now() + aheadMs;

async function get(name) {
  asked[name] = performance.now();
  try {
    const headers = tags[name] ? { "If-None-Match": tags[name] } : {};
    const answer = await fetch(PATHS[name], { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
    const ahead = Date.parse(answer.headers.get("Date")) - Date.now();
    aheadMs = Math.abs(ahead) > 2_000 ? ahead : 0; // the header has whole seconds
    if (answer.status !== 304) {
      const body = await answer.json().catch(() => ({}));
      if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`, { cause: answer.status });
      const gap = name === "status" && known.status ? body.taken_ms - known.status.taken_ms : 0;
      if (gap) gapMs = Math.min(Math.max(POLL_MS, gap), 120_000);
      known[name] = body;
      tags[name] = answer.headers.get("ETag");
    }
    delete failures[name];
  } catch (error) {
    const lost = error.name === "TimeoutError" ? "it does not answer" : "it cannot be reached";
    failures[name] = { text: error.cause ? error.message : lost, status: error.cause };
  }
  delete asked[name];
}

async function poll() {
  if (isPolling) return;
  clearTimeout(timer);
  isPolling = true;
  const isSlow = round++ % SLOW_EVERY === 0;
  const wanted = Object.keys(PATHS).filter((each) => isSlow || QUICK.includes(each) || failures[each]);
  await Promise.all(wanted.map(get));
  isPolling = false;
  failedRounds = Object.keys(failures).length ? failedRounds + 1 : 0;
  draw();
  const waitMs = Math.min(POLL_MS * 2 ** Math.max(0, failedRounds - 1), RETRY_MAX_MS);
  timer = setTimeout(poll, document.hidden ? HIDDEN_MS : waitMs);
}

// Returns why the state is not new; null if it is.
function staleness() {
  const failure = failures.status ?? Object.values(failures)[0];
  const ageMs = known.status ? now() - known.status.taken_ms : null;
  const lasts = ageMs === null ? "" : ` for ${span(ageMs)}`;
  if (failure && [401, 403].includes(failure.status)) {
    return { fact: "This node refuses to answer", cause: `${failure.text} Reload the page to give the token again.` };
  }
  if (failure) {
    const who = !failure.status ? "this node" : /zookeeper/i.test(failure.text) ? "ZooKeeper" : null;
    return { fact: who ? `No answer from ${who}${lasts}` : `No new state${lasts}`, cause: failure.text };
  }
  if (ageMs === null) return null;
  const silentMs = performance.now() - Math.min(...Object.values(asked));
  if (silentMs > SILENT_MS) return { fact: `No answer from this node${lasts}`, cause: "the page waits for it" };
  const isOld = ageMs > OLD_MS + gapMs && !document.hidden;
  return isOld ? { fact: `No new state${lasts}`, cause: "this node has read no newer one" } : null;
}

// --- Words ----------------------------------------------------------------------------------------

const plain = (n) => n.toLocaleString("en-US");
const count = (n, unit) => `${plain(n)} ${unit}${n === 1 ? "" : "s"}`;
const clock = (ms, length = 8) => new Date(ms).toISOString().slice(11, 11 + length);
const ago = (ms) => `${span(now() - ms).split(" ").slice(0, 2).join(" ")} ago`;
const sentence = (text) => text.replace(/^(?!bookmender )[a-z]/, (c) => c.toUpperCase());
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const compare = new Intl.Collator("en", { numeric: true }).compare;

function span(ms) {
  const s = Math.max(0, Math.round(ms / 1_000));
  for (const [unit, below, one, other] of [["d", "h", 86_400, 3_600], ["h", "min", 3_600, 60], ["min", "s", 60, 1]]) {
    const rest = s < 300 || one > 60 ? Math.floor((s % one) / other) : 0;
    if (s >= one) return `${Math.floor(s / one)} ${unit}${rest ? ` ${rest} ${below}` : ""}`;
  }
  return `${s} s`;
}

function size(bytes) {
  const power = Math.min(5, Math.floor(Math.log10(Math.max(1, bytes)) / 3)), n = bytes / 1_000 ** power;
  return `${n.toFixed(power && n < 10 ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB", "PB"][power]}`;
}

function some(names, total = names.length) {
  const more = total - Math.min(names.length, NAMES_MAX);
  return names.slice(0, NAMES_MAX).join(", ") + (more > 0 ? ` and ${plain(more)} more` : "");
}

// Foreign text may contain characters that hide or reorder others.
function clean(text) {
  const cut = text.length > TEXT_MAX ? `${text.slice(0, TEXT_MAX)}…` : text;
  return cut.replace(/[\p{Cc}\p{Cf}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

// --- Elements -------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);
const SVG = new Set(["svg", "use", "path", "rect", "circle", "line", "text"]);

// el("p.soft", { id: "x" }, "text", el("b", "more")): attributes may be left out. What is null,
// undefined or false is left out, too.
function el(name, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElementNS(`http://www.w3.org/${SVG.has(tag) ? "2000/svg" : "1999/xhtml"}`, tag);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  const isGiven = (each) => each !== null && each !== undefined && each !== false;
  for (const child of children.flat(Infinity).filter(isGiven)) {
    if (child.nodeType) made.append(child);
    else if (typeof child !== "object") made.append(clean(String(child)));
    else Object.entries(child).forEach(([key, value]) => isGiven(value) && made.setAttribute(key, clean(String(value))));
  }
  return made;
}

const icon = (name, hue = name) => el(`svg.icon.${hue}`, { "aria-hidden": true }, el("use", { href: `#i-${name}` }));
const time = (ms, text) => el("time", { datetime: new Date(ms).toISOString(), title: new Date(ms).toUTCString() }, text);
const utc = (ms) => time(ms, `${clock(ms)} UTC`);
const when = (ms) => time(ms, ago(ms));
const note = (...children) => el("p.soft.small", ...children);

function command(text) {
  const button = el("button", { type: "button", "data-key": text, "aria-label": `Copy: ${text}`, title: "Copy" }, icon("copy"));
  return el("span.command", el("code", text), button);
}

// Returns the text with its commands as such: what is between backticks, and what looks like one.
const WORDS = "list|show|close|restore|drain|maintenance|decommission|trust-identities|run|mark|status|verify|disable|enable|" +
  "lostbookierecoverydelay|-{1,2}[a-z][a-z-]*|[\\w.-]+:\\d+|[A-Z][A-Z_]*|\\d+[smhd]?";
const COMMAND = new RegExp("`([^`]+)`|(bookmender (?:status|history|queue|plan|ledger|bookie|repair|limits|hold|check|" +
  `fsck|disable|enable|recovery-delay|feed|archive|shell|doctor|config|local|daemon)(?![\\w-])(?: (?:${WORDS})(?![\\w-]))*)`);
const rich = (text) => text.split(COMMAND).map((part, i) =>
  part && (i % 3 === 0 ? part : part.startsWith("bookmender ") ? command(part) : el("code", part)));

// Makes ``old`` like ``fresh``, but keeps its elements: the focus, open folds and selected text.
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = fresh.data;
    return;
  }
  const gone = [...old.attributes].filter(({ name }) => !fresh.hasAttribute(name) && !["open", "data-done"].includes(name));
  gone.forEach(({ name }) => old.removeAttribute(name));
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const keyed = new Map([...old.children].map((each) => [each.dataset.key, each]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = child.dataset?.key, found = key ? keyed.get(key) : at?.dataset?.key ? null : at;
    const kept = found?.nodeName === child.nodeName ? found : child;
    if (kept !== at) old.insertBefore(kept, at);
    if (kept !== child) morph(kept, child);
    at = kept.nextSibling;
  }
  for (let next; at; at = next) {
    next = at.nextSibling;
    at.remove();
  }
}

function put(id, ...children) {
  const fresh = $(id).cloneNode(false);
  fresh.append(...el("div", ...children).childNodes);
  fresh.hidden = !fresh.hasChildNodes();
  morph($(id), fresh);
}

// --- State ----------------------------------------------------------------------------------------

const HUES = { OK: "ok", WARN: "warn", ERROR: "error", UNKNOWN: "unknown", INFO: "info" };
const isMuted = (condition) => condition.muted_until_ms > now();
const blockedIn = (status) => status.conditions.find((each) => each.code === "REPAIRS_BLOCKED")?.data;
let spoken = null, toSpeak = null;

// Returns the parts of the queue, also for a node that does not tell them.
function progressOf(status) {
  const { queue, waiting } = status, help = blockedIn(status)?.ledger_count ?? 0;
  const rest = Math.max(0, queue.total - queue.locked - waiting.count);
  const guess = { queued: queue.total, copying: queue.locked, next: rest, waiting: waiting.count - help, needs_help: help };
  return { bytes_left: null, bytes_per_s: null, left_s: null, samples: [], ...(status.progress ?? guess) };
}

// Returns true if all copies exist, and a leader that knows all ledgers says so.
function isWhole({ health, queue, conditions, unproven_ends: unproven, leader_state: state }) {
  const missing = sum(Object.values(state.absent_named_by.ledgers)) + (state.unavailable_ledgers?.count ?? 0);
  const isKnown = !!state.ledger_map?.is_complete && !unproven.count && !conditions.some(isMuted);
  return health === "OK" && isKnown && !queue.total && !missing;
}

function headline(status) {
  if (isWhole(status)) return "All ledgers are whole";
  const { lost, absent } = status.bookies, progress = progressOf(status);
  const unavailable = status.leader_state.unavailable_ledgers?.count;
  const parts = [
    unavailable && `${count(unavailable, "ledger")} unavailable`,
    lost.length && `${count(lost.length, "bookie")} lost`,
    absent.length && `${count(absent.length, "bookie")} absent`,
    progress.queued && `${count(progress.queued, "ledger")} to repair`,
    progress.needs_help && `${plain(progress.needs_help)} need help`,
    progress.left_s && `about ${span(progress.left_s * 1_000)} left`,
  ].filter(Boolean);
  const first = status.conditions.find((each) => !isMuted(each) && each.severity !== "INFO");
  if (!parts.length && first) return sentence(first.code.replaceAll("_", " ").toLowerCase());
  return parts.join(" · ") || "Nothing is wrong, as far as the nodes know";
}

function drawState() {
  const { status, node } = known, stale = staleness(), hue = stale ? "stale" : HUES[status?.health];
  if (!hue) return; // still reading
  const word = status && el("span.word", { id: "word", "data-health": status.health }, status.health);
  const title = stale ? stale.fact : headline(status);
  const cause = stale ? sentence(stale.cause.replace(/[^.!?]$/, "$&.")) : "";
  const about = [
    !status && "No state was read yet",
    status && [stale ? "This is the state of " : "State of ", utc(status.taken_ms), `, ${ago(status.taken_ms)}`],
    stale && word && [". The health was ", word],
    node && ` · node ${node.host} (pid ${node.pid})`,
  ];
  const told = el("div", el("h1", !stale && [word, " "], title), stale && el("p", rich(cause)), el("p.soft", about));
  const data = { "data-taken": status?.taken_ms, "data-queued": status?.queue.total, "data-stale": !!stale };
  morph($("state"), el(`div.state.${hue}`, { id: "state", ...data }, icon(hue), told));
  $("main").className = stale ? "stale" : "";
  document.title = `${stale ? "No new state" : `${status.health}: ${clean(title)}`} - bookmender`;
  drawFavicon(hue);
  // What holds for two looks is spoken once.
  const health = stale ? stale.fact.split(" for ")[0] : status.health;
  if (spoken !== health && toSpeak === health) {
    if (spoken) $("spoken").textContent = clean(stale ? `${title}. ${cause}` : `The health is ${health}: ${title}.`);
    spoken = health;
  }
  toSpeak = health;
}

function drawFavicon(hue) {
  const colour = getComputedStyle($("state")).getPropertyValue("--hue").trim();
  const d = { ok: "M8 1a7 7 0 1 0 .1 0z", warn: "M8 1l7 14H1z", error: "M1 1h14v14H1z" }[hue] ?? "M8 3a5 5 0 1 0 .1 0z";
  const image = `<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><path fill='${colour}' d='${d}'/></svg>`;
  const link = document.querySelector("link[rel=icon]"), href = `data:image/svg+xml,${encodeURIComponent(image)}`;
  if (link.href !== href) link.href = href;
}

// --- Conditions -----------------------------------------------------------------------------------

function conditionItem(each) {
  const { code, severity, fact, action, muted_until_ms: until } = each, unmute = `bookmender status --unmute ${code}`;
  const muted = isMuted(each) && [` · muted for another ${span(until - now())}: `, command(unmute)];
  return el("li", { "data-code": code, "data-key": code }, icon(HUES[severity]), el("div",
    el("p.fact", el("span.unseen", `${severity}: `), fact), el("p.action", rich(action)), note(code, muted)));
}

function drawConditions({ conditions }) {
  const open = conditions.filter((each) => !isMuted(each)), muted = conditions.filter(isMuted);
  const needsAction = open.some((each) => each.severity !== "INFO");
  const summary = `${count(muted.length, "muted condition")}: ${some(muted.map((each) => each.code))}`;
  put("conditions", conditions.length > 0 && [
    el("h2", needsAction ? "What to do" : "Worth knowing"),
    el("ul.items", open.map(conditionItem)),
    muted.length > 0 &&
      el("details", { "data-key": "muted" }, el("summary", summary), el("ul.items", muted.map(conditionItem))),
    note("More about a condition: ", command("bookmender status --explain CODE")),
  ]);
}

// --- Repair ---------------------------------------------------------------------------------------

// Returns a sentence that fits the curve.
function pace({ queued, waiting, needs_help: help, left_s: leftS, samples }, atMs) {
  if (help === queued) return "Every queued ledger needs help: time alone repairs none of them.";
  if (leftS !== null) return `About ${span(leftS * 1_000)} left${waiting + help ? ", without the ledgers that wait" : ""}.`;
  if (waiting + help >= queued) return "All queued ledgers wait, so the time left is not known.";
  const changed = (sign) => samples.findLast(({ ledgers }, i) => i && sign * (ledgers - samples[i - 1].ledgers) > 0)?.at_ms;
  const fellMs = changed(-1), roseMs = changed(1);
  if (samples.length < 2) return "The time left is not known yet.";
  if (roseMs && roseMs >= (fellMs ?? 0)) return "The queue has grown last, so the time left is not known.";
  if (fellMs && atMs - fellMs < 60_000) return "The queue becomes shorter; the time left is not known yet.";
  return `The queue has not become shorter for ${span(atMs - (fellMs ?? samples[0].at_ms))}.`;
}

// Returns the queue over time, and where it will be empty.
function curve(samples, leftS, atMs) {
  const width = Math.max(280, $("main").clientWidth), height = width < 500 ? 150 : 200;
  const left = 52, right = width - 14, low = height - 26;
  const first = samples[0], last = samples.at(-1), lastMs = Math.max(atMs, last.at_ms), endMs = lastMs + (leftS ?? 0) * 1_000;
  const most = Math.max(1, ...samples.map((each) => each.ledgers)), power = 10 ** Math.floor(Math.log10(most));
  const step = Math.max(1, [0.2, 0.5, 1, 2, 5].map((n) => n * power).find((each) => most / each <= 4));
  const top = Math.ceil(most / step) * step;
  const x = (ms) => left + ((right - left) * (ms - first.at_ms)) / Math.max(1, endMs - first.at_ms);
  const y = (ledgers) => low - ((low - 12) * ledgers) / top;
  const point = (each) => `${x(each.at_ms).toFixed(1)} ${y(each.ledgers).toFixed(1)}`;
  const line = [...samples, { ...last, at_ms: lastMs }].map(point).join("L");
  const rows = Array.from({ length: top / step + 1 }, (_, i) => [
    el(i ? "line.grid" : "line.base", { x1: left, x2: right, y1: y(i * step), y2: y(i * step) }),
    el("text.end", { x: left - 8, y: y(i * step) + 4 }, plain(i * step)),
  ]);
  const nowX = x(lastMs), below = { y: height - 6 };
  const label = `Queued ledgers: ${plain(first.ledgers)} ${ago(first.at_ms)}, at most ${plain(most)}, now ${plain(last.ledgers)}`;
  return el("svg.chart", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, rows,
    el("path.area", { d: `M${left} ${low}L${line}L${nowX} ${low}z` }), el("path.curve", { d: `M${line}` }),
    endMs > lastMs && el("path.guess", { d: `M${nowX} ${y(last.ledgers)}L${right} ${low}` }),
    el("circle.dot", { cx: nowX, cy: y(last.ledgers), r: 4 }),
    el("text", { x: left, ...below }, `${clock(first.at_ms, 5)} UTC`),
    nowX - left > 110 && el(endMs > lastMs ? "text.middle" : "text.end", { x: nowX, ...below }, "now"),
    right - nowX > 90 && el("text.end", { x: right, ...below }, `about ${clock(endMs, 5)}`));
}

function drawRepair(status) {
  const progress = progressOf(status), { queued, bytes_left: bytes, bytes_per_s: rate, left_s: leftS, samples } = progress;
  const number = (value, text) => el("div", el("dt", text), el("dd", value));
  const parts = Object.entries({ copying: "in repair", next: "next", waiting: "wait", needs_help: "need help" });
  let x = 0;
  const bar = parts.map(([name]) => {
    const width = (1_000 * progress[name]) / queued;
    x += width;
    return width > 0 && el(`rect.${name}`, { x: x - width, width: Math.max(1, width - 2), height: 10 });
  });
  put("repair", queued > 0 && [
    el("h2", "Repair"),
    el("dl.numbers", number(plain(queued), queued === 1 ? "ledger left" : "ledgers left"),
      bytes !== null && number(size(bytes), "left"),
      rate !== null && number(`${size(rate)}/s`, "copied"), leftS !== null && number(span(leftS * 1_000), "to go, about")),
    el("svg.bar", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": true }, bar),
    el("ul.legend", parts.map(([name, text]) =>
      progress[name] > 0 && el(`li.${name}`, { "data-part": name }, el("b", plain(progress[name])), ` ${text}`))),
    samples.length > 1 && el("figure", curve(samples, leftS, status.taken_ms)),
    el("p", { id: "pace" }, pace(progress, status.taken_ms)),
  ]);
}

// --- Bookies --------------------------------------------------------------------------------------

// What a tile shows: its letter, so that it is not told by its colour alone, and the word.
const KINDS = {
  writable: ["", "writable"], drain: ["D", "draining"], drained: ["D", "drained"],
  "read-only": ["R", "read-only"], maintenance: ["M", "in maintenance"],
  absent: ["A", "absent"], reformatted: ["F", "reformatted"], lost: ["L", "lost"],
};
const MISSING = ["absent", "reformatted", "lost"];
let tiles = new Map(), inTabOrder = null; // by id, what a tile shows; and the one tile that Tab reaches

function kindOf(bookie, status) {
  if (bookie.state === "lost") return "lost";
  if (status.bookies.reformatted.includes(bookie.bookie_id)) return "reformatted";
  if (bookie.maintenance) return "maintenance";
  if (bookie.drain && bookie.state !== "absent") return bookie.drain.is_drained ? "drained" : "drain";
  return bookie.state;
}

function detailsOf({ state, since_ms: since, lost_ms: lost, rack, ledgers_left: left, disk_space: space, drain, maintenance }) {
  const why = maintenance?.reason ? ` (${maintenance.reason})` : "";
  const toGo = drain?.is_drained ? ", done" : drain?.ledgers_left ? `, ${count(drain.ledgers_left, "ledger")} left` : "";
  return [
    since ? `${state} for ${span(now() - since)}` : state,
    lost && state === "absent" && (lost > now() ? `counts as lost in ${span(lost - now())}` : "counts as lost now"),
    rack && `rack ${rack}`,
    left > 0 && `${count(left, "ledger")} still ${left === 1 ? "names" : "name"} it`,
    left === 0 && state !== "writable" && "no ledger names it",
    space?.total_bytes && `${size(space.free_bytes)} of ${size(space.total_bytes)} free`,
    drain && `ordered: drain${toGo}`,
    maintenance && `ordered: maintenance for another ${span(maintenance.until_ms - now())}${why}`,
  ].filter(Boolean);
}

// Returns what all ids end with, from a dot or a colon on.
function commonEnd(ids) {
  let end = ids.length > 1 ? (ids[0].match(/[.:].*/)?.[0] ?? "") : "";
  while (end && !ids.every((id) => id.endsWith(end) && id.length > end.length)) end = end.slice(1).match(/[.:].*/)?.[0] ?? "";
  return end;
}

function drawBookies(status, { bookies, unreadable_orders: unreadable }) {
  const end = commonEnd(bookies.map((each) => each.bookie_id)), isDense = bookies.length > CARDS_MAX;
  const isLong = bookies.some((each) => each.bookie_id.length - end.length > 11);
  const racks = new Map(), totals = new Map();
  tiles = new Map();
  for (const bookie of bookies.toSorted((a, b) => compare(a.bookie_id, b.bookie_id))) {
    const kind = kindOf(bookie, status), rack = bookie.rack ?? "", id = bookie.bookie_id;
    tiles.set(id, { id, kind, state: bookie.state, details: detailsOf(bookie) });
    racks.set(rack, [...(racks.get(rack) ?? []), tiles.get(id)]);
    totals.set(kind, (totals.get(kind) ?? 0) + 1);
  }
  if (!tiles.has(inTabOrder)) inTabOrder = tiles.keys().next().value;
  const tile = ({ id, kind, state, details }) => {
    const [letter, word] = KINDS[kind] ?? ["?", kind], name = id.slice(0, id.length - end.length);
    const face = isDense ? letter : [el("b", name), el("span", letter && el("i", letter), ` ${word}`)];
    const label = `${id}: ${[word, ...details].join(", ")}`, tabindex = id === inTabOrder ? 0 : -1;
    const data = { type: "button", "data-key": id, "data-state": state, "aria-label": label, tabindex };
    return el(`button.tile.${kind}`, data, face);
  };
  const rack = ([name, its]) => {
    const missing = its.filter((each) => MISSING.includes(each.kind)).length;
    const told = missing ? `${plain(missing)} of ${plain(its.length)} missing` : count(its.length, "bookie");
    const title = el("h3", name || "Rack not known", el(missing ? "span.bad" : "span.soft", told));
    const layout = isDense ? "dense" : isLong ? "roomy" : "plain";
    return el("div.rack", { "data-key": `rack ${name}` }, (name || racks.size > 1) && title, el(`div.tiles.${layout}`, its.map(tile)));
  };
  const legend = Object.keys(KINDS).filter((kind) => totals.has(kind)).map((kind) =>
    el("li", el(`i.swatch.${kind}`, { "aria-hidden": true }, KINDS[kind][0]),
      el("b", plain(totals.get(kind))), ` ${KINDS[kind][1]}`));
  put("bookies", el("h2", "Bookies"), el("ul.legend", legend),
    [...racks].sort(([a], [b]) => !a - !b || compare(a, b)).map(rack),
    !bookies.length && el("p.soft", "No bookie is known."), end && note("All names end with ", el("code", end)),
    unreadable.length > 0 && el("p.bad", `Orders that cannot be read: ${some(unreadable)}`));
  if (!$("tip").hidden) showTip();
}

// Shows the details of the bookie that has the focus or the pointer.
function showTip() {
  const tile = document.querySelector(".tile:hover") ?? document.querySelector(".tile:focus"), tip = $("tip");
  tip.hidden = !tile;
  if (!tile) return;
  tip.replaceChildren(el("b", tile.dataset.key), ...tiles.get(tile.dataset.key).details.map((each) => el("p", sentence(each))));
  const at = tile.getBoundingClientRect(), isBelow = at.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${isBelow ? at.bottom + 6 : at.top - tip.offsetHeight - 6}px`;
}

// The arrow keys move the focus between tiles, which are one stop of the tab key.
function moveFocus(event) {
  if (event.key === "Escape") $("tip").hidden = true;
  const all = [...document.querySelectorAll(".tile")], at = all.indexOf(event.target);
  if (at < 0) return;
  const box = (each) => each.getBoundingClientRect(), here = box(all[at]);
  const beside = (sign) => all.filter((each) => sign * (box(each).top - here.top) > 4).reduce((best, each) => {
    const far = (it) => Math.abs(box(it).top - here.top) * 1_000 + Math.abs(box(it).left - here.left);
    return best && far(best) <= far(each) ? best : each;
  }, null);
  const moves = {
    ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1], Home: () => all[0], End: () => all.at(-1),
    ArrowDown: () => beside(1), ArrowUp: () => beside(-1),
  };
  const next = moves[event.key]?.();
  if (!next) return;
  event.preventDefault();
  inTabOrder = next.dataset.key;
  [all[at].tabIndex, next.tabIndex] = [-1, 0];
  next.focus();
}

// --- Waiting ledgers, history ---------------------------------------------------------------------

function drawBlocked(status) {
  const help = blockedIn(status)?.by_reason ?? {}, groups = Object.groupBy(status.waiting.ledgers, (each) => each.reason);
  const reason = ([name, notes]) => {
    const total = help[name] ?? notes.length, firstMs = Math.min(...notes.map((each) => each.since_ms));
    const tag = name in help ? el("span.tag.error", "needs help") : el("span.tag.info", "waits");
    const ledgers = some(notes.map((each) => each.ledger_id), total);
    return el("li", { "data-reason": name, "data-key": name }, el("b.total", plain(total)), el("div",
      el("p.fact", name.replaceAll("-", " "), " ", tag), el("p.action", rich(sentence(`${notes[0].detail}.`))),
      note(`${total === 1 ? "Ledger" : "Ledgers"} ${ledgers}, for up to ${span(now() - firstMs)}`)));
  };
  const ordered = Object.entries(groups).sort(([a], [b]) => (b in help) - (a in help));
  put("blocked", ordered.length > 0 && [
    el("h2", "Ledgers that wait"),
    el("ul.reasons", ordered.map(reason)),
    note("Each ledger: ", command("bookmender queue")),
  ]);
}

const EVENTS = { // icon and colour
  "bookie-lost": ["error"], "bookie-reformatted": ["error"], "bookie-returned": ["ok"],
  "ledgers-marked": ["mark", "warn"], "ledgers-repaired": ["ok"],
  "ledger-fenced": ["lock", "info"], "ledger-recovered": ["lock", "ok"], "recovery-unfinished": ["warn"],
  "leader-elected": ["leader", "info"], "hold-began": ["hold", "warn"], "hold-ended": ["hold", "info"],
  "check-finished": ["check", "info"], finding: ["warn"], order: ["order", "info"],
};

function drawHistory({ events, omitted, unreadable_records: unreadable }) {
  const item = ({ kind, at_ms: at, node, text }) => el("li", { "data-kind": kind, "data-key": `${at} ${node} ${kind} ${text}` },
    icon(...(EVENTS[kind] ?? ["info"])), el("p.at", el("span", ago(at)), el("span.soft", utc(at))),
    el("p", sentence(text), el("span.soft.small", ` ${node}`)));
  put("history", el("h2", "Last 24 hours"),
    events.length ? el("ol.timeline", events.toReversed().map(item)) : el("p.soft", "Nothing was recorded."),
    omitted > 0 && note(`${count(omitted, "earlier event")}: `, command("bookmender history --since 24h")),
    unreadable.length > 0 && el("p.bad", `Events may be missing. Unreadable: ${some(unreadable)}`));
}

// --- Nodes and checks -----------------------------------------------------------------------------

function outcomes(counts) {
  const found = Object.entries(counts).filter(([, n]) => n > 0).map(([name, n]) => `${name.replaceAll("_", " ")} ${plain(n)}`);
  return found.join(", ") || "nothing found";
}

// Yields name, state and time of each row, and true if something is wrong.
function* partRows({ status, node, checks }) {
  const { leader, leader_node: led, leader_state: { ledger_map: map }, last_audit: audit, last_fsck: fsck } = status;
  const leads = led ? `(pid ${led.pid})` : "(Java's AutoRecovery)";
  yield ["Leader", leader === null ? "none" : `${leader} ${leads}`, null, leader === null];
  const read = map?.is_complete ? "complete" : `loading, ${plain(map?.read ?? 0)} read`;
  if (map) yield ["Ledger map", read, null, !map.is_complete];
  const processes = Object.entries(Object.groupBy(status.nodes, (each) => `${each.host} (pid ${each.pid})`));
  for (const [name, its] of processes.slice(0, NODES_MAX)) {
    const isThis = its[0].host === node?.host && its[0].pid === node.pid;
    const roles = [...new Set(its.map((each) => each.role))].join(", "), sinceMs = Math.min(...its.map((each) => each.started_ms));
    yield ["Node", [name, isThis && el("span.soft", " this node"), `: ${roles}`], `runs for ${span(now() - sinceMs)}`];
  }
  if (processes.length > NODES_MAX) yield ["Nodes", `${plain(processes.length - NODES_MAX)} more`];
  for (const { role, is_alive: isAlive, is_connected: isConnected, is_working: isWorking } of node?.roles ?? []) {
    if (!(isAlive && isConnected && isWorking)) yield ["This node", `its ${role} is not ready`, null, true];
  }
  for (const concern of checks?.concerns ?? []) yield ["Checks", rich(concern), null, true];
  for (const { check, last, running, is_forced: isForced, next_due_ms: due, last_run_ms: at } of checks?.checks ?? []) {
    const dueText = due === null ? "not scheduled" : due <= now() ? "due now" : `due in ${span(due - now())}`;
    const left = running && `running, ${plain(running.ledgers_left)} of ${count(running.ledger_count, "ledger")} left`;
    const state = running ? left + (running.pause ? `, paused: ${running.pause}` : "")
      : last ? `${count(last.ledger_count, "ledger")}: ${outcomes(last.counts)}` : "no result yet";
    yield [`Check: ${check}`, [state, !running && el("span.soft", ` · ${isForced ? "requested" : dueText}`)], at && when(at)];
  }
  const audited = audit && `${count(audit.ledgers, "ledger")}, ${plain(audit.marks)} marked`;
  if (audit) yield ["Audit of bookies", audited, when(audit.finished_ms), audit.unreadable > 0];
  const verdicts = fsck && `${fsck.level}, ${count(fsck.ledgers, "ledger")}: ${outcomes(fsck.verdicts)}`;
  yield ["fsck", verdicts ?? ["no run yet · ", command("bookmender fsck run")], fsck && when(fsck.finished_ms), fsck?.exit_code > 0];
  const feed = status.conditions.find((each) => each.code.startsWith("FEED_"));
  if (feed) yield ["Change feed", feed.fact, null, true];
}

function drawParts() {
  const row = ([name, state, at, isBad]) =>
    el("tr", el("th", { scope: "row" }, name), el("td", isBad && icon("warn"), state), el("td.soft.at", at));
  put("parts", el("h2", "Nodes and checks"), el("table", el("tbody", [...partRows(known)].map(row))));
  $("cluster").textContent = clean(known.node?.cluster ?? "");
  $("version").textContent = clean(`bookmender ${known.node?.version ?? ""}`);
}

// --- The page -------------------------------------------------------------------------------------

function draw() {
  drawState();
  const { status, bookies, history } = known;
  if (!status) return;
  $("main").hidden = false;
  drawConditions(status);
  drawRepair(status);
  if (bookies) drawBookies(status, bookies);
  drawBlocked(status);
  if (history) drawHistory(history);
  drawParts();
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.key);
  } catch { // without TLS there is no clipboard
    getSelection().selectAllChildren(button.previousSibling);
    document.execCommand("copy");
  }
  $("spoken").textContent = `Copied: ${button.dataset.key}`;
  button.dataset.done = "";
  setTimeout(() => delete button.dataset.done, 1_500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".command button");
  if (button) copy(button);
});
for (const name of ["pointerover", "focusin", "focusout"]) document.addEventListener(name, () => setTimeout(showTip));
document.addEventListener("keydown", moveFocus);
document.addEventListener("scroll", () => ($("tip").hidden = true), { passive: true });
document.addEventListener("visibilitychange", () => document.hidden || poll());
addEventListener("resize", draw);
setInterval(draw, 1_000);
poll();
