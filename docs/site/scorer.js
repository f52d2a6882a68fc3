// Sphinx gives most pages that hold a word the same score, and sorts them by the alphabet. Here the
// pages that answer a question come first, and the history of the project last.
const pageScores = [
  [/^project\/changelog$/, -14],
  [/^decisions\//, -12],
  [/^reference\/compat_/, -6],
  [/index$/, 0],
  [/^(start|guides)\//, 3],
  [/^reference\//, 2],
  [/^losses\//, 1],
  [/./, 0],
];
Scorer.score = ([page, , , , score]) =>
  score + pageScores.find(([pattern]) => pattern.test(page))[1];

// One word in a heading says little about a page that was found by several words.
const byTerms = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) =>
  byTerms(terms, excluded).map((result) =>
    result.with(4, terms.size > 1 ? Math.min(result[4], Scorer.term) : result[4]),
  );
