// Wires the page: which columns there are, what is sent, when it stops.

import { ApiError, get, stream } from "./api.js";
import { Column } from "./column.js";
import { element, passes, SHADES, shade } from "./format.js";
import { Inspector } from "./inspector.js";
import { factsOf, newsOf, request } from "./wire.js";

const $ = (id) => document.getElementById(id);
const inspector = new Inspector($("inspector"));
let facts = null;
let columns = [];
let running = null; // AbortController while answers come

function say(problem) {
  $("problem").textContent = problem;
}

async function connect() {
  try {
    const key = $("key").value;
    const [models, tokenizer] = await Promise.all([get("v1/models", key), get("tokenizer_info", key)]);
    facts = factsOf(models.data[0], Boolean(tokenizer.chat_template));
  } catch (error) {
    tell(error);
    return false;
  }
  say("");
  $("model").textContent = facts.summary;
  document.title = `${facts.name} · tah2`;
  columns = [new Column("A", facts, inspector)];
  arrange();
  return true;
}

function arrange() {
  $("columns").replaceChildren(...columns.map((column) => column.root));
  $("compare").setAttribute("aria-pressed", columns.length > 1);
  showLegend();
}

function showLegend() {
  const deepest = facts.maxDepth;
  const entries = Array.from({ length: Math.min(Math.max(deepest, 2), SHADES) }, (_, at) => {
    const more = at + 1 === SHADES ? " or more" : "";
    return element("span", { role: "listitem", class: "token", "data-depth": shade(at + 1), text: at ? `${at + 1} passes${more}` : passes(1) });
  });
  $("legend").replaceChildren(...entries);
}

function toggleCompare() {
  if (running || !facts) return;
  if (columns.length > 1) columns.pop();
  else {
    const second = new Column("B", facts, inspector);
    second.takeOver(columns[0]);
    columns.push(second);
  }
  arrange();
}

// What the fields under "more" say; null where one of them is wrong.
function sampling() {
  const fields = ["temperature", "max-tokens", "seed"].map($);
  const wrong = fields.find((field) => !field.checkValidity());
  if (wrong) {
    $("more").open = true;
    wrong.reportValidity();
    return null;
  }
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : $("seed").valueAsNumber;
  return { temperature: $("temperature").valueAsNumber, max_tokens: $("max-tokens").valueAsNumber, seed };
}

async function send(event) {
  event?.preventDefault();
  const text = $("message").value;
  if (running || !text.trim() || (!facts && !(await connect()))) return;
  const drawn = sampling();
  if (!drawn) return;
  say("");
  $("message").value = "";
  running = new AbortController();
  busy(true);
  const ends = await Promise.all(columns.map((column) => answer(column, text, drawn)));
  running = null;
  busy(false);
  const failed = ends.find(({ error }) => error)?.error;
  if (failed) {
    tell(failed);
    if (ends.every(({ tokens }) => !tokens)) $("message").value = text;
  }
  $("status").textContent = columns.map((column, at) => `Setting ${column.name}: ${ends[at].summary}`).join(" ");
}

// One column's answer; never throws, so that the other column goes on.
async function answer(column, text, drawn) {
  column.ask(text);
  const [path, body] = request(facts, column, $("system").value.trim(), drawn);
  const made = column.begin();
  let failure = null;
  let note = "";
  try {
    for await (const chunk of stream(path, body, $("key").value, running.signal)) made.add(newsOf(chunk));
    if (made.finish === "length") note = "Cut at the most tokens that were allowed.";
  } catch (error) {
    if (error.name === "AbortError") note = "Stopped.";
    else {
      failure = error;
      note = made.tokens.length ? "Ended by an error." : "";
    }
  }
  made.end(note);
  if (!made.tokens.length) column.takeBack();
  return { error: failure, tokens: made.tokens.length, summary: made.summary };
}

function tell(error) {
  const known = error instanceof ApiError;
  say(known ? error.message : `Something went wrong in this page: ${error.message}`);
  if (!known) console.error(error);
  if (error.status === 401) {
    $("more").open = true;
    $("key").focus();
  }
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("reset").disabled = on;
  $("compare").disabled = on;
  $("columns").setAttribute("aria-busy", on);
  $("status").textContent = on ? "The answer is being written." : "";
  if (!on && document.activeElement === document.body) $("message").focus();
}

$("composer").addEventListener("submit", send);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("message").focus();
});
$("reset").addEventListener("click", () => {
  for (const column of columns) column.clear();
  say("");
  $("status").textContent = "The conversation is forgotten.";
  $("message").focus();
});
$("compare").addEventListener("click", toggleCompare);
$("key").addEventListener("change", () => facts ?? connect());
$("digits").addEventListener("change", () => document.body.classList.toggle("digits", $("digits").checked));
connect().then(() => facts && $("message").focus());
