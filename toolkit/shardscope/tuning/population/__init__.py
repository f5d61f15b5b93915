"""Population based training (Jaderberg et al. 2017, arXiv 1711.09846) over real runs.

Some members train side by side, each an ordinary run that goes on from a checkpoint. After every interval the worst
take over weights and settings of better ones (exploit) and change the settings a little (explore). So settings are
found as a schedule over the training, not as one value for all of it.

    explore.py      the space: what may change, and how each kind of setting moves
    settings.py     settings by dotted path, put into a job
    objectives.py   what members are scored by
    exploit.py      who takes over from whom
    record.py       what is written down, and how far a population has come by it
    journal.py      the file it is written to, safe against a kill at any byte
    driver.py       trains, scores, decides: `train_population`
    view.py         `Population`: everything that can be told from the folder

A clone takes over its parent's checkpoint: weights, moments, position in the data, random state, and what compression
remembers as long as the method stays the same. What an explored setting leaves no place for starts afresh; the run's
`resume` event and the lineage say what.
"""

from shardscope.tuning.population.driver import train_population
from shardscope.tuning.population.explore import Explorable, Ranges
from shardscope.tuning.population.record import PopulationError
from shardscope.tuning.population.view import Population

__all__ = ["Explorable", "Population", "PopulationError", "Ranges", "train_population"]
