// The looks of a report's page: light and dark, wide and narrow, on paper.
#include "fsdp/train/report/page_frame.h"

namespace fsdp::train {

namespace {

constexpr std::string_view kPageStyle = R"css(
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1d2025;--soft:#61666e;--line:#e4e4e0;
--blue:#2563c9;--blue-soft:#8fb2e6;--orange:#c8641b;--green:#2b8a58;--violet:#7a55c0;--red:#c2382f;--teal:#16858c;--pink:#c2418b;--brown:#86622f;--shade:rgba(37,99,201,.13)}
@media (prefers-color-scheme:dark){:root{--page:#14161a;--card:#1c1f25;--ink:#e6e8eb;--soft:#9aa1ab;--line:#30353d;
--blue:#6ea6ff;--blue-soft:#3f5f93;--orange:#f0a05a;--green:#5cc48b;--violet:#b095ee;--red:#f0776c;--teal:#56c3ca;--pink:#ef83bd;--brown:#cda36b;--shade:rgba(110,166,255,.16)}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1160px;margin:0 auto;padding:2rem 1.25rem 3rem}
h1{font-size:1.6rem;line-height:1.25;font-weight:650;margin:0;overflow-wrap:anywhere}
h2{font-size:1rem;font-weight:650;margin:0}
h3{font-size:.8rem;font-weight:650;color:var(--soft);margin:1.1rem 0 .25rem}
.status{margin:.35rem 0 1.5rem;color:var(--soft);overflow-wrap:anywhere}
.status b{color:var(--ink);font-weight:600}
.status .dot{display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.5em;background:var(--green)}
.status .dot.running{background:var(--blue)}.status .dot.stopped{background:var(--orange)}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem}
.wide{grid-column:1/-1}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:.75rem;margin:0 0 1rem}
.card,.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;min-width:0}
.card{padding:1rem 1.15rem 1.1rem}
.tile{padding:.7rem .9rem}
.tile dt{color:var(--soft);font-size:.8rem}
.tile dd{margin:0;font-size:1.3rem;font-weight:600;line-height:1.35;white-space:nowrap}
.tile dd small{display:block;white-space:normal;min-height:1.4em;font-size:.78rem;font-weight:400;color:var(--soft)}
.card>header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.1rem .7rem;margin-bottom:.75rem}
.unit,.note,small{color:var(--soft)}
.unit,.legend{font-size:.82rem}
.note{font-size:.82rem;margin:.6rem 0 0}
.legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:0 1rem}
.key::before{content:"";display:inline-block;width:1.1em;height:0;border-top:2.5px solid var(--blue);vertical-align:.28em;margin-right:.45em}
.key.faint::before{border-color:var(--blue-soft)}
.key.dots::before{width:.55em;height:.55em;border:0;border-radius:50%;background:var(--orange);vertical-align:.02em}
.plot{position:relative;display:grid;grid-template:13rem 1.5rem/2.9rem minmax(0,1fr)}
.wide .plot{grid-template-rows:19rem 1.5rem}
.area{grid-area:1/2;position:relative;border-bottom:1px solid var(--soft);touch-action:pan-y;user-select:none}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}.area.cut svg{overflow:hidden}
.ylabels{grid-area:1/1;position:relative}.xlabels{grid-area:2/2;position:relative}
.ylabels span,.xlabels span{position:absolute;font-size:.76rem;line-height:1;color:var(--soft);white-space:nowrap}
.ylabels span{right:.55rem;transform:translateY(50%)}
.xlabels span{top:.5rem;transform:translateX(-50%)}
.xlabels::before{content:"step";position:absolute;right:100%;top:.5rem;margin-right:.55rem;font-size:.76rem;line-height:1;color:var(--soft)}
.tokens .chart .xlabels::before{content:"tokens"}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.grid path.grid,path.grid{stroke:var(--line);stroke-width:1}
path.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 4}
path.range{fill:var(--shade);stroke:none}
path.main{stroke:var(--blue);stroke-width:2}
path.faint{stroke:var(--blue-soft);stroke-width:1.25}
path.thread{stroke:var(--orange);stroke-width:1.25;opacity:.6}
path.dots{stroke:var(--orange);stroke-width:6;stroke-linecap:round}
.c0{--orange:var(--blue)}.c1{--blue:var(--orange)}.c2{--blue:var(--green);--orange:var(--green)}.c3{--blue:var(--violet);--orange:var(--violet)}
.c4{--blue:var(--red);--orange:var(--red)}.c5{--blue:var(--teal);--orange:var(--teal)}.c6{--blue:var(--pink);--orange:var(--pink)}.c7{--blue:var(--brown);--orange:var(--brown)}
path.again{stroke-dasharray:7 4}.key.again::before{border-top-style:dashed}
.chosen{position:absolute;top:0;bottom:0;background:var(--shade);border:solid var(--blue);border-width:0 1px;pointer-events:none}
.axis{display:flex;flex-wrap:wrap;align-items:center;gap:.4rem;margin:0 0 .75rem;font-size:.82rem;color:var(--soft)}
h1+.axis,h1+.grid{margin-top:1rem}
button{font:inherit;font-size:.82rem;line-height:1.3;padding:.15rem .6rem;color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:6px;cursor:pointer}
button[aria-pressed=true]{border-color:var(--blue);color:var(--blue)}
[hidden]{display:none}
.scrolls{overflow-x:auto}
.rule{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.read{position:absolute;top:.35rem;padding:.3rem .55rem;background:var(--card);border:1px solid var(--line);border-radius:6px;
font-size:.78rem;line-height:1.45;white-space:nowrap;pointer-events:none;box-shadow:0 2px 8px rgba(0,0,0,.12)}
.read b{font-weight:600}
.bars{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:.45rem .9rem;align-items:center;font-size:.9rem}
.track{position:relative;height:.95rem;background:var(--shade);border-radius:3px}
.track i{position:absolute;inset:0 auto 0 0;background:var(--blue);border-radius:3px}
.track u{position:absolute;top:-3px;bottom:-3px;width:2px;margin-left:-1px;background:var(--ink)}
.bars .total{font-weight:600}
.bars span:nth-child(3n){text-align:right}
.key.measured::before{height:.7em;border:0;background:var(--blue);border-radius:2px;vertical-align:-.05em}
.key.forecast::before{width:2px;height:.95em;border:0;background:var(--ink);vertical-align:-.15em}
.timeline{display:grid;gap:.3rem}
.timeline .row{display:grid;grid-template-columns:4.6rem minmax(0,1fr) 6.8rem;gap:.7rem;align-items:center;font-size:.88rem}
.timeline svg{width:100%;height:1.5rem;background:var(--shade);border-radius:3px;display:block}
.timeline .busy{text-align:right;white-space:nowrap}
.timeline .xlabels{grid-area:auto;height:1.5rem;margin:0 7.5rem 0 5.3rem}.timeline .xlabels::before{content:"ms"}
.row-0 rect{fill:var(--blue)}.row-1 rect{fill:var(--orange)}.row-2 rect{fill:var(--green)}.row-3 rect{fill:var(--violet)}.row-4 rect{fill:var(--soft)}
.timeline rect:hover{fill:var(--ink)}
pre{margin:0;padding:.85rem 1rem;background:var(--page);border-radius:6px;font:13.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre b{color:var(--blue);font-weight:600}
table{width:100%;border-collapse:collapse;font-size:.88rem;table-layout:auto}
th,td{text-align:left;vertical-align:top;padding:.3rem .75rem .3rem 0;border-top:1px solid var(--line);font-weight:400}
thead th{color:var(--soft);font-size:.8rem;border-top:0}
td:last-child,th:last-child{padding-right:0}
td{overflow-wrap:anywhere}
th[scope=row]{white-space:nowrap}
.number{text-align:right;white-space:nowrap}
.settings{columns:2;column-gap:2.5rem}
.settings section{break-inside:avoid}
.settings section:first-child h3{margin-top:0}
.settings td{text-align:right}
.changed th,.changed td{font-weight:650}
.changed th::after{content:" *";color:var(--orange)}
footer{margin-top:1.5rem;color:var(--soft);font-size:.82rem}
@media (max-width:760px){.grid,.settings{grid-template-columns:minmax(0,1fr);columns:1}main{padding:1.25rem .75rem 2rem}
.card{padding:.85rem .8rem}.wide .plot{grid-template-rows:14rem 1.5rem}.plot{grid-template-columns:2.5rem minmax(0,1fr)}
.legend{margin-left:0}.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem}.tile dd{font-size:1.15rem}
.xlabels span:nth-child(even){display:none}.bars{grid-template-columns:minmax(0,1fr) max-content;gap:.15rem .6rem}
.bars .track{grid-column:1/-1;order:0;margin-bottom:.45rem}.bars span:nth-child(3n+1){order:0}.bars{grid-auto-flow:dense}
.timeline .row{grid-template-columns:3.9rem minmax(0,1fr) 4.2rem;gap:.4rem}.timeline small{display:none}.timeline .xlabels{margin:0 4.6rem 0 4.3rem}
.wraps th[scope=row]{white-space:normal}.extra{display:none}}
@media print{body{background:#fff}.axis,button{display:none}.card,.tile{break-inside:avoid}}
)css";

}  // namespace

std::string_view page_style() { return kPageStyle; }

}  // namespace fsdp::train
