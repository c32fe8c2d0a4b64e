// Keeps the page up to date. The server sends the markup of each section that has changed, in which
// everything from the cluster is escaped. Without this file the page reloads itself.
"use strict";

const SILENCE_MAX_MS = 45_000; // three missed heartbeats
const RETRY_MS = 10_000;
const connection = document.getElementById("connection");
const spoken = document.getElementById("spoken");
const waiting = new Map(); // sections that are not replaced while text in them is selected
let source;
let heardAt = 0;
let takenAt = null;

function connect() {
  source?.close();
  heardAt = Date.now();
  source = new EventSource("events");
  source.onmessage = (event) => {
    heard();
    show(JSON.parse(event.data));
  };
  source.addEventListener("beat", heard);
  source.onerror = () => {
    say(false);
    // The browser connects again by itself, except after an answer such as "too many pages".
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
}

function heard() {
  heardAt = Date.now();
  say(true);
}

function say(isLive) {
  const since = takenAt ? ` This is the state of ${takenAt}.` : "";
  const text = isLive ? "Live" : `Not connected to the node.${since}`;
  if (connection.textContent !== text) connection.textContent = text;
  connection.className = isLive ? "live" : "alert";
}

function show(state) {
  document.title = `${state.title} - bookmender`;
  if (state.taken_ms) takenAt = `${new Date(state.taken_ms).toISOString().slice(11, 19)} UTC`;
  const before = word();
  for (const [id, markup] of Object.entries(state.sections)) waiting.set(id, markup);
  for (const [id, markup] of waiting) {
    const section = document.getElementById(id);
    if (section && isSelected(section)) continue;
    if (section) replace(section, markup);
    waiting.delete(id);
  }
  if (before && before !== word()) spoken.textContent = `The health is ${word()} now.`;
}

function word() {
  return document.getElementById("word")?.textContent;
}

function isSelected(section) {
  const selection = document.getSelection();
  return !selection.isCollapsed && selection.containsNode(section, true);
}

// Folds stay open, and the keyboard focus stays where it is.
function replace(section, markup) {
  const open = new Set();
  for (const each of section.querySelectorAll("details[open]")) open.add(each.dataset.key);
  const fold = section.contains(document.activeElement)
    ? document.activeElement.closest("details")?.dataset.key
    : undefined;
  section.innerHTML = markup;
  for (const each of section.querySelectorAll("details")) {
    each.open = open.has(each.dataset.key);
    if (each.dataset.key === fold) each.querySelector("summary").focus({ preventScroll: true });
  }
}

setInterval(() => {
  if (source.readyState !== EventSource.CLOSED && Date.now() - heardAt > SILENCE_MAX_MS) {
    say(false);
    connect();
  }
}, 5_000);
connect();
