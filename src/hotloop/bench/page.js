for (const table of document.querySelectorAll('table')) for (const [i, head] of [...table.tHead.rows[0].cells].entries()) {
  const sort = () => {
    const up = head.getAttribute('aria-sort') !== 'ascending', body = table.tBodies[0];
    for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const value = row => row.cells[i].dataset.value ?? row.cells[i].textContent, sign = up ? 1 : -1;
    const compare = (a, b) => a !== '' && b !== '' && isFinite(a) && isFinite(b) ? a - b : String(a).localeCompare(b);
    body.append(...[...body.rows].sort((a, b) => sign * compare(value(a), value(b))));
  };
  head.tabIndex = 0; head.onclick = sort; head.onkeydown = e => { if (e.key === 'Enter') sort(); };
}
