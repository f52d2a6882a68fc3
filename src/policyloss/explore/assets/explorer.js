// For the console and for tests: what the page computes, from data that it checks first.
globalThis.policyloss = Object.freeze({
  check: (data) => checkedSpec(data),
  formula: (data) => formulaOf(checkedSpec(data)).map(([name, x]) => `${name} = ${expressionText(x)}`),
  evaluate: (data, step) => {
    const result = evaluate(formulaOf(checkedSpec(data)), step);
    const gradients = ["logp", "entropy", "divergence"].map((name) => [name, result.gradient(name)]);
    return { loss: result.value("loss"), ...Object.fromEntries(gradients) };
  },
  python: (data) => pythonOf(checkedSpec(data)),
  elsewhere: (data) => elsewhereOf(checkedSpec(data)).map(({ part, what }) => [part, what]),
});
