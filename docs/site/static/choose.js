// The form of "Which loss should I use?". Every answer was computed when the page was made; this
// script only looks it up.
const chooseForm = document.getElementById("choose-form");
if (chooseForm) {
  const data = JSON.parse(document.getElementById("choose-data").textContent);
  const element = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    node.textContent = text;
    Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
    return node;
  };
  const addSelect = (name, label, options) => {
    const select = element("select", "", { id: `choose-${name}` });
    options.forEach(([value, text]) => select.append(new Option(text, value)));
    const row = element("p", "");
    row.append(element("label", label, { for: select.id }), select);
    chooseForm.append(row);
    return select;
  };
  const selects = data.questions.map((q) => addSelect(q.name, q.text, Object.entries(q.answers)));
  const names = new Set(Object.values(data.frameworks).flatMap(Object.keys));
  const framework = addSelect("framework", "Which framework do you use?", [
    ["", "none, or this library's trainer"],
    ...[...names].map((name) => [name, name]),
  ]);
  const answer = element("div", "", { role: "status", class: "choose-answer" });
  chooseForm.append(answer);
  const show = () => {
    const choice = data.choices[selects.map((select) => select.value).join(" ")];
    const code = element("pre", `spec = ${choice.code}`);
    const loss = element("a", choice.preset, { href: `../losses/${choice.preset}.html` });
    const title = element("p", "Begin with ");
    title.append(loss, ". It reads " + choice.reads.join(", ") + ".");
    const list = element("ul", "");
    choice.reasons.forEach((i) => {
      const [text, source] = data.reasons[i];
      const item = element("li", text + " ");
      item.append(element("cite", source));
      list.append(item);
    });
    answer.replaceChildren(title, code, list, element("p", `Advantages: ${choice.advantages}`));
    if (framework.value) {
      const called = data.frameworks[choice.code][framework.value] || [];
      const known = element("ul", "");
      called.forEach((text) => known.append(element("li", text)));
      const heading = called.length
        ? `What ${framework.value} calls its parts:`
        : `${framework.value} has no option of its own for any part of it.`;
      const guide = element("a", "How to use this library there", {
        href: "frameworks.html",
      });
      answer.append(element("p", heading), known, guide);
    }
  };
  chooseForm.addEventListener("change", show);
  chooseForm.addEventListener("submit", (event) => event.preventDefault());
  show();
}
