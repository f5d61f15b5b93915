"""Population based training (Jaderberg et al. 2017, arXiv 1711.09846) over real runs.

Members train side by side, each as ordinary runs that resume from checkpoints. After every interval the worst members
copy the weights and settings of better ones (exploit) and change the settings a little (explore). The result is a
schedule of settings over the training, not one value for all of it.

    explore.py      the space: which settings may change, and how each kind moves
    settings.py     settings by dotted path, applied to a job
    objectives.py   the objectives that score members
    exploit.py      selection of parents
    record.py       the records of a population, and its progress as read from them
    journal.py      the file of the records, safe against a kill at any byte
    driver.py       trains, scores and decides: `train_population`
    view.py         `Population`: everything that the folder holds

A clone takes over its parent's checkpoint: weights, moments, position in the data, random state, and the state of the
compressor if the method stays the same. State that does not fit an explored setting starts afresh; the run's `resume`
event and the lineage report it.
"""

from shardscope.tuning.population.driver import train_population
from shardscope.tuning.population.explore import Explorable, Ranges
from shardscope.tuning.population.record import PopulationError
from shardscope.tuning.population.view import Population

__all__ = ["Explorable", "Population", "PopulationError", "Ranges", "train_population"]
