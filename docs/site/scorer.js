// How the search ranks what it finds: Sphinx's own numbers, and decision records and the list of files below all other pages.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const behind = docname.startsWith("decisions/") || ["onboarding", "changelog"].includes(docname);
    const first = docname.startsWith("how-to/") || docname.startsWith("tutorial/");
    return score + (behind ? -50 : first ? 5 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
