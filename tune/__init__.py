"""`sentray tune`: search over the settings of a recipe, on Ray Tune.

    settings       the section `search`, and what may stand there
    definition     a search as its file describes it, and the recipe of every trial
    space          the values that settings may have
    searchers      where the next configuration comes from: grid, random, tpe; plug-ins add theirs
    trial_queue    which trial comes next; trials: what is known of each
    ray_tune       runs the queue on Ray Tune; actor: where a trial trains; nested: with several
                   workers; population: population-based training
    phases         the whole search: inputs, trials, confirmations, test sets
    progress, report: what it tells while it runs, and at the end

A trial is the training of a recipe, so its result is an artifact that every search finds. Stages
and pipeline know nothing of searches.
"""
