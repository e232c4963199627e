"""The pages' style sheet, with a light and a dark scheme, for windows from 400 px on."""

CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5c6878;--line:#dde2e9;
--grid:#e9edf2;--good:#137a4b;--goodbg:#dcf3e6;--bad:#b42318;--badbg:#fde5e2;--warn:#8a5300;
--warnbg:#fdeecb;--fault:#c0263b;--gap:#c0263b22;
--s0:#2563eb;--s1:#d9620b;--s2:#0f8a6d;--s3:#8b3fc4;--s4:#b7860b;--s5:#c72c63;--s6:#3d7d94;--s7:#8a94a3}
@media (prefers-color-scheme:dark){:root{--bg:#0e1217;--card:#171c24;--ink:#e6eaf0;--soft:#98a4b3;
--line:#2a323d;--grid:#242b35;--good:#57d49a;--goodbg:#123425;--bad:#ff8d80;--badbg:#431a17;
--warn:#f5c25b;--warnbg:#3b2c0a;--fault:#ff6b7d;--gap:#ff6b7d2e;
--s0:#6ea0ff;--s1:#ff9a52;--s2:#3ccfa9;--s3:#c38cf3;--s4:#e6c04c;--s5:#ff7aa8;--s6:#7cc3db;
--s7:#8f9bab}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
main,header{max-width:1380px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:34px 0 12px}
h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:6px 0;max-width:90ch}
.sub{color:var(--soft);overflow-wrap:anywhere}
.head{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:center}
.badge{font-size:13px;font-weight:600;padding:3px 11px;border-radius:99px;white-space:nowrap}
.badge.good{background:var(--goodbg);color:var(--good)}
.badge.bad{background:var(--badbg);color:var(--bad)}
.badge.warn{background:var(--warnbg);color:var(--warn)}
.reasons{border-left:3px solid var(--bad);padding:2px 12px;margin:14px 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(155px,1fr));gap:10px;margin-top:20px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:11px 14px}
.tile b{display:block;font-size:22px;line-height:1.3;font-weight:620;
font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:12.5px;line-height:1.35;display:block}
.tile .what{color:var(--ink);font-size:13px}
.tile.bad b{color:var(--bad)}.tile.good b{color:var(--good)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,310px),1fr));gap:14px}
.card{padding:14px 14px 8px;min-width:0}
.card svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;padding:0}
.narrow{display:none!important}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:7px 14px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
tr:first-child th{border-top:0}
th{font-weight:600;color:var(--soft);font-size:12.5px}
th:first-child,td:first-child,.left{text-align:left}
th.wrap{text-align:left}
td.wrap{white-space:normal;overflow-wrap:anywhere;min-width:180px;text-align:left}
td.good{color:var(--good)}td.bad{color:var(--bad)}td.dim{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
section>.card+.card{margin-top:14px}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}
pre{overflow-x:auto;font-size:13px;line-height:1.45;margin:10px 0}
footer{max-width:1380px;margin:30px auto;padding:14px 20px;color:var(--soft);font-size:13px;
border-top:1px solid var(--line)}
svg text{font-size:11px;fill:var(--ink);font-family:inherit}
svg .tick,svg .axis,svg .key{fill:var(--soft)}
svg .panel{font-size:12.5px;font-weight:600}
svg .middle,svg .mark text{text-anchor:middle}svg .right{text-anchor:end}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
svg .dash{stroke-dasharray:5 4;stroke-width:1.5}
svg .area{fill:var(--c);fill-opacity:.22;stroke:var(--c);stroke-width:1.2;stroke-opacity:.7}
svg .dot{fill:var(--c);stroke:var(--card);stroke-width:1.5}
svg .note{fill:var(--soft)}
svg .mark line{stroke:var(--fault);stroke-width:1.4;stroke-dasharray:3 3}
svg .mark text{fill:var(--fault);font-weight:600}
svg .band{fill:var(--gap)}
svg .zero{stroke:var(--soft)}
svg .range{stroke-width:5;stroke-linecap:round;stroke:var(--s7);opacity:.55}
svg .range.good{stroke:var(--good)}svg circle.good{fill:var(--good)}
svg .range.bad{stroke:var(--bad)}svg circle.bad{fill:var(--bad)}svg circle.unsure{fill:var(--s7)}
.keys{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--soft);margin:0 0 8px}
.keys i{display:inline-block;width:12px;height:8px;border-radius:2px;margin-right:6px}
@media (max-width:720px){.wide{display:none!important}.narrow{display:block!important}
main,header{padding-left:12px;padding-right:12px}h1{font-size:21px}
.tiles{grid-template-columns:repeat(2,1fr)}.tile b{font-size:19px}.card{padding:10px 8px 4px}
th,td{padding:6px 9px}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""
