"""Flags about output, events, metrics, health probes and the dashboard."""

from __future__ import annotations

from torchelastic.cli.options import values
from torchelastic.cli.options.flag import LOGS, Flag
from torchelastic.config import PAGE_ANYWHERE, Std

LOG_FLAGS = (
    Flag(
        name="--log-dir",
        group=LOGS,
        metavar="DIR",
        convert=values.optional_text,
        default="",
        default_words="a temporary directory",
        torchrun=True,
        help="Directory for log files, with subdirectories per job, generation and rank. "
        "/dev/null: no log files.",
    ),
    Flag(
        name="--redirects",
        short="-r",
        group=LOGS,
        metavar="STREAMS",
        convert=Std.from_str,
        torchrun=True,
        help="Write output to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; "
        "or per local rank, such as 0:1,1:3.",
    ),
    Flag(
        name="--tee",
        short="-t",
        group=LOGS,
        metavar="STREAMS",
        convert=Std.from_str,
        torchrun=True,
        help="Write output to files and to the console; takes the same values as --redirects.",
    ),
    Flag(
        name="--log-line-prefix-template",
        group=LOGS,
        metavar="TEXT",
        convert=values.optional_text,
        default="",
        default_words="[${role_name}${local_rank}]:",
        torchrun=True,
        also_read="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        help="Prefix of every line that --tee writes to the console; ${role_name}, ${local_rank}, "
        "${rank} and ${hostname} are replaced.",
    ),
    Flag(
        name="--no-log-copy",
        group=LOGS,
        help="Keep no copy of the output in files. By default, without --redirects and --tee, "
        "output that does not go to a terminal is also copied to files, at most 64 to 128 MiB per "
        "stream.",
    ),
    Flag(
        name="--local-ranks-filter",
        group=LOGS,
        metavar="RANKS",
        convert=values.local_ranks,
        default="",
        default_words="all",
        torchrun=True,
        help="Show only the output of these local ranks on the console, such as 0,1.",
    ),
    Flag(
        name="--duplicate-stdout-filters",
        group=LOGS,
        metavar="WORDS",
        convert=values.words,
        default="",
        default_words="none",
        torchrun=True,
        help="Also copy lines of teed stdout that contain one of these comma-separated words to "
        "one file per node (write `,,` for a comma).",
    ),
    Flag(
        name="--duplicate-stderr-filters",
        group=LOGS,
        metavar="WORDS",
        convert=values.words,
        default="",
        default_words="none",
        torchrun=True,
        help="The same for stderr.",
    ),
    Flag(
        name="--event-log-handler",
        group=LOGS,
        metavar="NAME",
        convert=values.text,
        default="null",
        torchrun=True,
        help="Where to send events in addition to the event log: null, console, a registered "
        "name, or PACKAGE.MODULE:NAME of your own handler.",
    ),
    Flag(
        name="--metrics-address",
        group=LOGS,
        metavar="[HOST:]PORT",
        convert=values.listening,
        default="",
        default_words="none",
        help="Serve Prometheus metrics at [HOST:]PORT (loopback only if HOST is omitted).",
    ),
    Flag(
        name="--metrics-token-file",
        group=LOGS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="none",
        help="File with the bearer token that scrapers must send; required unless HOST is "
        "loopback.",
    ),
    Flag(
        name="--health-port",
        group=LOGS,
        metavar="PORT",
        convert=values.port,
        default="",
        default_words="none",
        help="Answer health probes at this port: /livez, and /readyz (in the current generation).",
    ),
    Flag(
        name="--dashboard",
        group=LOGS,
        metavar="[[HOST:]PORT]",
        convert=values.page,
        default="",
        default_words="none",
        alone=PAGE_ANYWHERE,
        looks=values.PAGE,
        help="Serve a web page that shows the job (loopback only if HOST is omitted; port 29480, "
        "or a free one, if PORT is omitted or auto).",
    ),
    Flag(
        name="--dashboard-token-file",
        group=LOGS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="generated unless HOST is loopback",
        help="File with the token that a browser must send to open the page.",
    ),
)
