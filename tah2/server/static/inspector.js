// What is known of one token, shown beside it: its depth, what the gate said, what each depth predicted.

import { element, passes, percent, shade, visible } from "./format.js";

const LEAVE = 150; // milliseconds in which the pointer may travel from the token to the panel

export class Inspector {
  constructor(panel) {
    this.panel = panel;
    this.facts = new WeakMap();
    this.shown = null;
    this.timer = 0;
    panel.addEventListener("pointerenter", () => clearTimeout(this.timer));
    panel.addEventListener("pointerleave", () => this.hideSoon());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("scroll", () => this.place(), { capture: true, passive: true });
  }

  // Tokens inside `container` show themselves on hover and focus; arrow keys go from one to the next.
  watch(container) {
    const token = (event) => event.target.closest?.(".token");
    container.addEventListener("pointerover", (event) => token(event) && this.show(token(event)));
    container.addEventListener("pointerout", (event) => token(event) && this.hideSoon());
    container.addEventListener("focusin", (event) => token(event) && this.show(token(event)));
    container.addEventListener("focusout", () => this.hide());
    container.addEventListener("keydown", (event) => token(event) && this.move(event, token(event)));
  }

  add(span, facts) {
    this.facts.set(span, facts);
  }

  move(event, from) {
    const tokens = [...from.closest(".turn").querySelectorAll(".token")];
    const at = tokens.indexOf(from);
    const to = {
      ArrowRight: () => tokens[at + 1],
      ArrowLeft: () => tokens[at - 1],
      Home: () => tokens[0],
      End: () => tokens.at(-1),
      ArrowDown: () => nearest(from, tokens.slice(at + 1), 1),
      ArrowUp: () => nearest(from, tokens.slice(0, at).reverse(), -1),
    }[event.key]?.();
    if (to === undefined) return;
    event.preventDefault();
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
    to.scrollIntoView({ block: "nearest" });
    this.show(to);
  }

  show(span) {
    clearTimeout(this.timer);
    const facts = this.facts.get(span);
    if (!facts || this.shown === span) return;
    this.hide();
    this.panel.replaceChildren(...describe(facts));
    this.panel.hidden = false;
    this.shown = span;
    span.classList.add("shown");
    span.setAttribute("aria-describedby", this.panel.id);
    this.place();
  }

  // Beside the token, wherever it has moved to.
  place() {
    if (!this.shown) return;
    const box = this.shown.getClientRects()[0] ?? this.shown.getBoundingClientRect();
    const { width, height } = this.panel.getBoundingClientRect();
    const below = box.bottom + 8 + height < innerHeight || box.top < height + 8;
    this.panel.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.panel.style.top = `${below ? box.bottom + 8 : box.top - height - 8}px`;
  }

  hideSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), LEAVE);
  }

  hide() {
    clearTimeout(this.timer);
    this.panel.hidden = true;
    this.shown?.classList.remove("shown");
    this.shown?.removeAttribute("aria-describedby");
    this.shown = null;
  }
}

// The token of the next line (or the one before) that lies closest below or above.
function nearest(from, others, direction) {
  const here = from.getBoundingClientRect();
  const boxes = others.map((span) => [span, span.getBoundingClientRect()]);
  const line = boxes.find(([, box]) => (box.top - here.top) * direction > here.height / 2)?.[1].top;
  if (line === undefined) return undefined;
  const middle = here.left + here.width / 2;
  const distance = ([, box]) => Math.abs(box.left + box.width / 2 - middle);
  return boxes.filter(([, box]) => Math.abs(box.top - line) < here.height / 2).sort((a, b) => distance(a) - distance(b))[0][0];
}

function describe({ chosen, depth, maxDepth, threshold, continueProbs, top, perDepth }) {
  const title = element("h3", {}, element("code", { text: visible(chosen) }), ` took ${passes(depth)} of at most ${maxDepth}`);
  const parts = [title];
  if (continueProbs?.length) parts.push(gateTable(continueProbs, depth, threshold));
  if (perDepth?.length || top?.length) parts.push(predictionTable(perDepth ?? [], top ?? [], chosen));
  return parts;
}

// After each pass: the probability to go on, and what happened.
function gateTable(probabilities, depth, threshold) {
  const rows = probabilities.map((probability, at) => {
    const meter = element("meter", { min: 0, max: 1, value: probability, "aria-hidden": "true" });
    const verdict = at + 1 < depth ? "went on" : "stopped";
    return element(
      "tr",
      {},
      element("th", { scope: "row", text: `after pass ${at + 1}` }),
      element("td", {}, meter, ` ${percent(probability)}`),
      element("td", { text: verdict }),
    );
  });
  const caption = threshold === null ? "Probability to continue" : `Probability to continue (threshold ${threshold})`;
  return element("table", {}, element("caption", { class: "hidden", text: caption }), element("tbody", {}, ...rows));
}

// One column per depth, and the mixture that the token was drawn from.
function predictionTable(perDepth, mixed, chosen) {
  const columns = perDepth.map((list, at) => [`depth ${at + 1}`, list, at + 1]);
  if (mixed.length && perDepth.length !== 1) columns.push([perDepth.length ? "mixed" : "predicted", mixed, 0]);
  const head = columns.map(([name, , depth]) => {
    const label = element("span", { text: name });
    if (depth) {
      label.className = "token";
      label.dataset.depth = shade(depth);
    }
    return element("th", { scope: "col" }, label);
  });
  const length = Math.max(...columns.map(([, list]) => list.length));
  const rows = Array.from({ length }, (_, rank) =>
    element("tr", {}, ...columns.map(([, list]) => prediction(list[rank], chosen))));
  const caption = element("caption", { class: "hidden", text: "Most probable tokens per depth" });
  return element("table", {}, caption, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

function prediction(entry, chosen) {
  if (!entry) return element("td");
  const share = element("span", { class: "percent", text: ` ${percent(Math.exp(entry.logprob))}` });
  const attributes = entry.token === chosen ? { class: "chosen" } : {};
  return element("td", attributes, element("code", { text: visible(entry.token) }), share);
}
