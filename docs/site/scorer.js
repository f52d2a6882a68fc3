// Sphinx gives most pages that hold a word the same score, and sorts them by the alphabet. Here the
// sections that answer a question come first, and the history of the project last.
const sectionScores = { start: 3, guides: 3, reference: 2, losses: 1, decisions: -12 };
const pageScores = { "project/changelog": -14 };
Scorer.score = ([page, , , , score]) =>
  score + (pageScores[page] ?? sectionScores[page.split("/")[0]] ?? 0);

// One word in a heading says little about a page that was found by several words.
const byTerms = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) =>
  byTerms(terms, excluded).map((result) =>
    result.with(4, terms.size > 1 ? Math.min(result[4], Scorer.term) : result[4]),
  );
