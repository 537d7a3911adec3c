const dark = window.matchMedia('(prefers-color-scheme: dark)');
function ink() {
  const style = getComputedStyle(document.documentElement);
  const color = style.getPropertyValue('--ink').trim();
  const line = style.getPropertyValue('--line').trim();
  document.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.relayout(plot, {
    'font.color': color, 'xaxis.gridcolor': line, 'yaxis.gridcolor': line,
    'xaxis.linecolor': line, 'yaxis.linecolor': line}));
}
dark.addEventListener('change', ink);
window.addEventListener('load', ink);
