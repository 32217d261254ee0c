"""Jobs that turn files into files: ``InputFile -> (OutputFiles, Metadata)``, each input once, whatever happens."""

from penstock.jobs.output import Out
from penstock.jobs.runner import Processed, process
from penstock.jobs.settling import Failure

__all__ = ["Failure", "Out", "Processed", "process"]
