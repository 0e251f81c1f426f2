// One conversation under one setting: its sliders, its turns, what its last answer cost.

import { countDepths, element, passes, percent, shade, si } from "./format.js";

const NEAR_END = 60; // pixels from the end within which the transcript follows the answer

export class Column {
  constructor(name, facts, inspector) {
    const content = document.querySelector("#column-template").content.cloneNode(true);
    this.root = content.querySelector(".column");
    for (const part of ["transcript", "spread", "stats", "depth", "threshold", "knobs"]) this[part] = content.querySelector(`.${part}`);
    this.name = name;
    this.facts = facts;
    this.inspector = inspector;
    this.messages = [];
    const title = content.querySelector("h2");
    title.textContent = `Setting ${name}`;
    title.id = `setting-${name}`;
    this.root.setAttribute("aria-labelledby", title.id);
    this.knobs.setAttribute("aria-label", `Setting ${name}`);
    this.transcript.setAttribute("aria-label", `Conversation under setting ${name}`);
    this.setUpSliders();
    this.inspector.watch(this.transcript);
    this.clear();
  }

  setUpSliders() {
    const { maxDepth, exitThreshold, gated } = this.facts;
    this.depth.max = Math.max(2 * maxDepth, 4);
    this.depth.value = maxDepth;
    this.threshold.value = exitThreshold;
    this.threshold.disabled = !gated;
    for (const slider of [this.depth, this.threshold]) slider.addEventListener("input", () => this.showKnobs());
    this.showKnobs();
  }

  showKnobs() {
    const trained = this.depth.valueAsNumber === this.facts.maxDepth ? " (the checkpoint's)" : "";
    this.root.querySelector(".depth-value").textContent = passes(this.depth.valueAsNumber);
    this.depth.setAttribute("aria-valuetext", passes(this.depth.valueAsNumber) + trained);
    const said = this.threshold.disabled ? "no gate decides" : this.threshold.valueAsNumber.toFixed(2);
    this.root.querySelector(".threshold-value").textContent = said;
    this.threshold.setAttribute("aria-valuetext", `${said}: a higher one stops earlier`);
  }

  get setting() {
    const chosen = { max_depth: this.depth.valueAsNumber };
    return this.threshold.disabled ? chosen : { ...chosen, exit_threshold: this.threshold.valueAsNumber };
  }

  clear() {
    this.messages = [];
    this.transcript.replaceChildren(
      element("p", { class: "empty", text: "Every token of an answer is shaded by the passes that the model spent on it. Point at a token, or go to it with Tab and the arrow keys, to see what each pass predicted." }),
    );
    this.spread.replaceChildren();
    this.spread.setAttribute("aria-label", "No answer yet");
    this.stats.textContent = "No answer yet.";
  }

  // Go on from where another column stands.
  takeOver(other) {
    if (!other.messages.length) return;
    this.messages = other.messages.map((message) => ({ ...message }));
    this.transcript.replaceChildren(element("p", { class: "note", text: `Goes on from the conversation of setting ${other.name}.` }));
  }

  turn(kind, title) {
    this.transcript.querySelector(".empty")?.remove();
    const text = element("div", { class: "text" });
    const made = element("div", { class: `turn ${kind}` }, element("h3", { text: title }), text);
    this.transcript.append(made);
    this.toEnd();
    return made;
  }

  ask(text) {
    this.messages.push({ role: "user", content: text });
    this.turn("mine", "You").querySelector(".text").textContent = text;
  }

  // A message without an answer is taken back, so that it can be sent again.
  takeBack() {
    this.messages.pop();
    this.transcript.lastElementChild?.remove();
  }

  toEnd() {
    this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  begin() {
    return new Answer(this, this.turn("running", `Answer, ${this.describe()}`));
  }

  describe() {
    const depth = `at most ${passes(this.depth.valueAsNumber)}`;
    return this.threshold.disabled ? depth : `${depth}, threshold ${this.threshold.valueAsNumber.toFixed(2)}`;
  }

  showSpread(tokens) {
    const shares = countDepths(tokens).map(([depth, count]) => [depth, count / tokens.length]);
    this.spread.setAttribute("aria-label", shares.map(([depth, share]) => `${passes(depth)}: ${percent(share)}`).join(", "));
    this.spread.replaceChildren(...shares.map(([depth, share]) => {
      const bar = element("i", { "data-depth": shade(depth), title: `${passes(depth)}: ${percent(share)}` });
      bar.style.flex = `${share} 1 0`;
      return bar;
    }));
  }
}

class Answer {
  constructor(column, turn) {
    this.column = column;
    this.turn = turn;
    this.text = turn.querySelector(".text");
    this.reasoning = element("div", { class: "text reasoning", "aria-label": "Reasoning", role: "group" });
    this.text.before(this.reasoning);
    this.tokens = [];
    this.content = "";
    this.usage = null;
    this.setting = { maxDepth: column.depth.valueAsNumber, threshold: column.threshold.disabled ? null : column.threshold.valueAsNumber };
    this.started = performance.now();
    this.first = null;
    this.finish = null;
  }

  // News of one chunk: tokens as { text, depth, ... }, whether they are reasoning, the usage so far (its FLOPs may be unknown).
  add({ tokens, usage, finish }) {
    const { transcript } = this.column;
    const follows = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR_END;
    for (const token of tokens) this.addToken(token);
    if (tokens.length) this.column.showSpread(this.tokens);
    if (usage?.decode_flops != null) this.usage = usage;
    this.finish = finish ?? this.finish;
    this.showStats();
    if (follows) this.column.toEnd();
  }

  addToken(token) {
    this.first ??= performance.now();
    if (token.counted) this.tokens.push(token);
    if (!token.reasoning) this.content += token.text;
    if (token.text === "") return;
    const span = element("span", { class: "token", "data-depth": shade(token.depth), "data-passes": token.depth, text: token.text });
    span.tabIndex = this.turn.querySelector(".token") ? -1 : 0;
    this.column.inspector.add(span, { ...token, ...this.setting });
    (token.reasoning ? this.reasoning : this.text).append(span);
  }

  get seconds() {
    return (performance.now() - (this.first ?? this.started)) / 1000;
  }

  get meanDepth() {
    return this.tokens.reduce((sum, { depth }) => sum + depth, 0) / this.tokens.length;
  }

  get ratio() {
    const { decode_flops: flops, plain_decode_flops: plain } = this.usage ?? {};
    return plain > 0 ? flops / plain : null;
  }

  get summary() {
    const count = this.tokens.length;
    if (!count) return "No tokens.";
    const parts = [`${count} token${count === 1 ? "" : "s"}`, `mean depth ${this.meanDepth.toFixed(2)}`];
    if (this.ratio !== null) {
      parts.push(`${this.ratio.toFixed(2)} × the plain model's FLOPs`);
      parts.push(`${si(this.usage.decode_flops / Math.max(count - 1, 1))}FLOPs per token`);
    }
    if (count > 1 && this.seconds > 0) parts.push(`${((count - 1) / this.seconds).toPrecision(3)} tokens/s`);
    return parts.join(" · ");
  }

  showStats() {
    this.column.stats.textContent = this.summary;
  }

  // `note`: why it ended, where that is not plain to see.
  end(note) {
    this.turn.classList.remove("running");
    this.showStats();
    if (note) this.turn.append(element("p", { class: "note", text: note }));
    if (this.tokens.length) this.column.messages.push({ role: "assistant", content: this.content });
    else this.turn.remove();
  }
}
