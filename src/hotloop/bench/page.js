const key = cell => cell.dataset.value ?? cell.textContent;
const isNumber = text => text !== '' && isFinite(text);
const compare = (a, b) => isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(b);

function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells], up = heads[column].getAttribute('aria-sort') !== 'ascending';
  for (const head of heads) head.removeAttribute('aria-sort');
  heads[column].setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const rows = [...table.tBodies[0].rows], empty = row => key(row.cells[column]) === '\u2013';
  const full = rows.filter(row => !empty(row));
  full.sort((a, b) => (up ? 1 : -1) * compare(key(a.cells[column]), key(b.cells[column])));
  table.tBodies[0].append(...full, ...rows.filter(empty));  // what has no value is last in both directions
}

for (const table of document.querySelectorAll('table'))
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement('button');
    button.textContent = head.textContent;
    button.onclick = () => sort(table, column);
    head.replaceChildren(button);
  }

// A table says that it scrolls where it does: its bar is hidden on most screens.
const markScrolling = () => {
  for (const wrap of document.querySelectorAll('.wrap')) wrap.classList.toggle('scrolls', wrap.scrollWidth > wrap.clientWidth + 1);
};
markScrolling();
addEventListener('resize', markScrolling);
document.addEventListener('toggle', markScrolling, true);

function checkTable(table, problem) {
  for (const [column, head] of [...table.tHead.rows[0].cells].entries())
    for (const sign of [1, -1]) {
      head.firstChild.click();
      const found = [...table.tBodies[0].rows].map(row => key(row.cells[column])).filter(each => each !== '\u2013');
      if (found.some((each, i) => i && sign * compare(found[i - 1], each) > 0)) problem(`not sorted: ${head.textContent}`);
    }
}

const seenOf = element => element.getBoundingClientRect();
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;

function checkChart(svg, problem) {
  const name = svg.querySelector('title').textContent, box = svg.getBBox(), seen = seenOf(svg), said = [...svg.querySelectorAll('text')];
  if (!(box.width > 0 && box.height > 0 && seen.width > 0 && seen.height > 0)) problem(`not drawn: ${name}`);
  if (!svg.querySelector('polyline,polygon,circle,rect.box,line.middle')) problem(`empty: ${name}`);
  for (const [i, text] of said.entries()) {
    const at = seenOf(text);
    if (at.left < seen.left - 2 || at.right > seen.right + 2) problem(`text cut off: ${name}: ${text.textContent}`);
    for (const other of said.slice(i + 1))
      if (overlap(at, seenOf(other))) problem(`texts overprint: ${name}: ${text.textContent} / ${other.textContent}`);
  }
}

// Every column is inside its table's frame, or the page says that the table scrolls.
function checkColumns(wrap, problem) {
  const name = wrap.getAttribute('aria-label'), seen = seenOf(wrap);
  for (const cell of wrap.querySelectorAll('th,td'))
    if (cell.scrollWidth > cell.clientWidth + 1) problem(`a cell runs into the next: ${name}: ${cell.textContent}`);
  const cut = [...wrap.querySelectorAll('th')].some(head => seenOf(head).right > seen.right + 2);
  const hint = wrap.previousElementSibling;
  if (cut && !(wrap.classList.contains('scrolls') && seenOf(hint).height > 0)) problem(`columns cut off without a hint: ${name}`);
}

function selfCheck() {
  const problems = [], problem = text => problems.push(text), root = document.documentElement;
  for (const details of document.querySelectorAll('details')) details.open = true;
  markScrolling();
  const charts = [...document.querySelectorAll('svg.chart')].filter(svg => seenOf(svg).width > 0), tables = document.querySelectorAll('table');
  for (const svg of charts) checkChart(svg, problem);
  for (const wrap of document.querySelectorAll('.wrap')) checkColumns(wrap, problem);
  const sizes = new Set(charts.map(svg => (13 * seenOf(svg).width / svg.viewBox.baseVal.width).toFixed(0)));
  if (sizes.size > 1) problem(`letters of several sizes: ${[...sizes].join(', ')} px`);
  for (const table of tables) checkTable(table, problem);
  if (root.scrollWidth > root.clientWidth + 1) problem(`wider than the window: ${root.scrollWidth} > ${root.clientWidth}`);
  const found = document.createElement('pre');
  found.id = 'selfcheck';
  found.textContent = JSON.stringify({charts: charts.length, tables: tables.length, width: root.clientWidth, problems});
  document.body.append(found);
}
if (location.hash === '#selfcheck') selfCheck();
