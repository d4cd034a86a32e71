/* Open a model and run its layers: programs of kernel calls, on scratch memory and threads that a call takes. */
#define _GNU_SOURCE
#include "latbench.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "packed_file.h"
#include "thread_team.h"

enum { SLOTS = 64, MOST_THREADS = 1024, LINE = 64, SHARE_FLOATS = 16384 };
static const int64_t MOST_FLOATS = PTRDIFF_MAX / (int64_t)sizeof(float);

/* What a call needs for itself. Later calls take it over. */
typedef struct {
    atomic_flag taken;
    thread_team *team;
    unsigned char *scratch;
    uint64_t scratch_bytes;
    unsigned char **kept; /* buffers that keep what lies in them, by their number; NULL before they are used */
} call_slot;

typedef struct {
    atomic_flag taken;
    _Atomic(float *) memory;
    int64_t floats;
} lent_memory;

struct latbench_model {
    packed_file file;
    const layer_entry *layers;
    latbench_share share; /* NULL: the threads of a call's own team */
    void *share_context;
    call_slot slots[SLOTS];
    lent_memory lent[SLOTS];
};

static const void *at(const latbench_model *model, uint64_t place) { return model->file.section + place; }

static int fail_for_memory(latbench_error *error) {
    return set_error(error, LATBENCH_UNUSABLE, "the system has no memory left for this call");
}

latbench_model *latbench_open(const char *path, const char *level, latbench_error *error) {
    set_error(error, LATBENCH_OK, "%s", "");
    if (!path) {
        set_error(error, LATBENCH_BAD_ARGUMENT, "the path of the packed file is NULL");
        return NULL;
    }
    latbench_model *model = calloc(1, sizeof *model);
    if (!model) {
        fail_for_memory(error);
        return NULL;
    }
    if (map_packed_file(path, level, &model->file, error)) {
        free(model);
        return NULL;
    }
    for (int i = 0; i < SLOTS; i++) {
        atomic_flag_clear(&model->slots[i].taken);
        atomic_flag_clear(&model->lent[i].taken);
    }
    model->layers = at(model, model->file.head->layers);
    return model;
}

static void empty_slot(const latbench_model *model, call_slot *slot) {
    end_team(slot->team);
    free(slot->scratch);
    for (uint64_t i = 0; slot->kept && i < model->file.head->kept; i++) free(slot->kept[i]);
    free(slot->kept);
}

void latbench_close(latbench_model *model) {
    if (!model) return;
    /* What is taken still belongs to a call in another thread of a process that forked: it has no one here, and may be
     * half changed. */
    for (int i = 0; i < SLOTS; i++) {
        if (!atomic_flag_test_and_set(&model->slots[i].taken)) empty_slot(model, &model->slots[i]);
        if (!atomic_flag_test_and_set(&model->lent[i].taken)) free(model->lent[i].memory);
    }
    unmap_packed_file(&model->file);
    free(model);
}

void latbench_set_share(latbench_model *model, latbench_share share, void *context) {
    model->share = share;
    model->share_context = context;
}

static void run_parts(const latbench_model *model, const call_slot *slot, team_part run, void *job, int64_t parts,
                      int threads) {
    if (!model->share) run_team(slot->team, threads, run, job, parts);
    else if (threads > 1 && parts > 1) model->share(model->share_context, run, job, parts, threads);
    else for (int64_t part = 0; part < parts; part++) run(job, part);
}

const char *latbench_level(const latbench_model *model) { return model->file.level->name; }

int latbench_count_layers(const latbench_model *model) { return (int)model->file.head->layer_count; }

static const layer_entry *find_layer(const latbench_model *model, int layer) {
    return layer >= 0 && layer < latbench_count_layers(model) ? model->layers + layer : NULL;
}

static int refuse_layer(const latbench_model *model, int layer, latbench_error *error) {
    return set_error(error, LATBENCH_BAD_ARGUMENT, "there is no layer %d: the model has %d", layer,
                     latbench_count_layers(model));
}

int latbench_find(const latbench_model *model, const char *name) {
    if (!name) return -1;
    for (int i = 0; i < latbench_count_layers(model); i++)
        if (!strcmp(at(model, model->layers[i].name), name)) return i;
    return -1;
}

int latbench_describe(const latbench_model *model, int layer, latbench_layer *found, latbench_error *error) {
    const layer_entry *entry = find_layer(model, layer);
    if (!entry) return refuse_layer(model, layer, error);
    *found = (latbench_layer){.name = at(model, entry->name), .kind = (int)entry->kind,
                              .outputs = (int64_t)entry->outputs, .inputs = (int64_t)entry->inputs};
    for (int i = 0; i < 3; i++) {
        found->x[i] = (int64_t)entry->x[i];
        found->y[i] = (int64_t)entry->y[i];
    }
    return LATBENCH_OK;
}

/* The program for the most of `size` tokens or images, with the most of so many threads. There is one for 1 and 1. */
static const program_entry *choose_program(const latbench_model *model, const layer_entry *layer, int64_t size,
                                           int threads) {
    const program_entry *programs = at(model, layer->programs), *best = NULL;
    for (uint64_t i = 0; i < layer->program_count; i++) {
        const program_entry *each = programs + i;
        if (each->size > (uint64_t)size || each->threads > (uint64_t)threads) continue;
        if (!best || each->size > best->size || (each->size == best->size && each->threads > best->threads))
            best = each;
    }
    return best;
}

const char *latbench_kernel(const latbench_model *model, int layer, int64_t size, int threads) {
    const layer_entry *entry = find_layer(model, layer);
    if (!entry || size < 1 || threads < 1) return NULL;
    return at(model, choose_program(model, entry, size, threads)->kernel);
}

/* Take a slot that no other call has; NULL where all are taken. A forked process starts threads of its own. */
static call_slot *take_slot(latbench_model *model) {
    for (int i = 0; i < SLOTS; i++)
        if (!atomic_flag_test_and_set_explicit(&model->slots[i].taken, memory_order_acquire)) return model->slots + i;
    return NULL;
}

static int prepare_slot(const latbench_model *model, call_slot *slot, latbench_error *error) {
    if (slot->team && !is_own_team(slot->team)) {
        end_team(slot->team);
        slot->team = NULL;
    }
    if (!slot->team) slot->team = new_team();
    if (!slot->kept) slot->kept = calloc(model->file.head->kept + 1, sizeof *slot->kept);
    return slot->team && slot->kept ? LATBENCH_OK : fail_for_memory(error);
}

static int reserve_scratch(call_slot *slot, uint64_t bytes, latbench_error *error) {
    if (bytes <= slot->scratch_bytes) return LATBENCH_OK;
    void *found = NULL;
    free(slot->scratch);
    slot->scratch = NULL;
    slot->scratch_bytes = 0;
    if (posix_memalign(&found, LINE, bytes)) return fail_for_memory(error);
    slot->scratch = found;
    slot->scratch_bytes = bytes;
    return LATBENCH_OK;
}

static int reserve_kept(call_slot *slot, const buffer_entry *buffer, latbench_error *error) {
    void *found = NULL;
    if (slot->kept[buffer->kept - 1]) return LATBENCH_OK;
    if (posix_memalign(&found, LINE, buffer->bytes)) return fail_for_memory(error);
    for (uint64_t i = 0; i < buffer->bytes / 4; i++) ((uint32_t *)found)[i] = (uint32_t)buffer->fill;
    slot->kept[buffer->kept - 1] = found;
    return LATBENCH_OK;
}

typedef struct { kernel_part function; int64_t frame; } kernel_job;

static void run_part(void *given, int64_t part) {
    const kernel_job *job = given;
    job->function(job->frame, part);
}

typedef struct { const float *x; float *y; const float *bias; } call_places;

static uint64_t resolve(const varying_entry *each, const call_places *places, const call_slot *slot,
                        const buffer_entry *buffers) {
    switch (each->where) {
    case PLACE_NUMBER: return each->offset;
    case PLACE_X: return (uint64_t)places->x + each->offset;
    case PLACE_Y: return (uint64_t)places->y + each->offset;
    case PLACE_BIAS: return (uint64_t)places->bias + each->offset;
    }
    const buffer_entry *buffer = buffers + (each->where - PLACE_BUFFER);
    const unsigned char *begin = buffer->kept ? slot->kept[buffer->kept - 1] : slot->scratch + buffer->place;
    return (uint64_t)begin + each->offset;
}

static int run_step(const latbench_model *model, const program_entry *program, const step_entry *step,
                    call_slot *slot, const call_places *places, int threads) {
    uint64_t frame[LATBENCH_MOST_WORDS];
    memcpy(frame, at(model, step->frame), step->words * sizeof *frame);
    const relocation_entry *relocations = at(model, step->relocations);
    for (uint64_t i = 0; i < step->relocation_count; i++)
        frame[relocations[i].word] = (uint64_t)at(model, relocations[i].place);
    const varying_entry *varying = at(model, step->varying);
    const buffer_entry *buffers = at(model, program->buffers);
    for (uint64_t i = 0; i < step->varying_count; i++)
        frame[varying[i].word] = resolve(varying + i, places, slot, buffers);
    const stage_entry *stages = at(model, step->stages);
    for (uint64_t i = 0; i < step->stage_count; i++) {
        kernel_job job = {latbench_functions[model->file.level->first_function + stages[i].function], (int64_t)frame};
        run_parts(model, slot, run_part, &job, (int64_t)stages[i].parts, threads);
    }
    return frame[step->noted] != 0;
}

static int run_program(const latbench_model *model, const program_entry *program, call_slot *slot,
                       const call_places *places, int threads, latbench_error *error) {
    const buffer_entry *buffers = at(model, program->buffers);
    int code = reserve_scratch(slot, program->scratch_bytes, error);
    for (uint64_t i = 0; !code && i < program->buffer_count; i++)
        if (buffers[i].kept) code = reserve_kept(slot, buffers + i, error);
    const step_entry *steps = at(model, program->steps);
    for (uint64_t i = 0; !code && i < program->step_count; i++)
        if (run_step(model, program, steps + i, slot, places, threads))
            code = set_error(error, LATBENCH_FAULT, "kernel %s failed: please report it",
                             (const char *)at(model, program->kernel));
    return code;
}

/* Floats of one token or image, and of its result. */
static int64_t count_inputs(const layer_entry *layer) {
    return (int64_t)(layer->kind == LATBENCH_CONV2D ? layer->x[0] * layer->x[1] * layer->x[2] : layer->inputs);
}

static int64_t count_outputs(const layer_entry *layer) {
    return (int64_t)(layer->kind == LATBENCH_CONV2D ? layer->y[0] * layer->y[1] * layer->y[2] : layer->outputs);
}

static int64_t count_more(const layer_entry *layer) {
    int64_t inputs = count_inputs(layer), outputs = count_outputs(layer);
    return inputs > outputs ? inputs : outputs;
}

/* Run any number of tokens or images, the largest exported numbers first. */
static int run_layer(latbench_model *model, const layer_entry *layer, const float *x, float *y, int64_t size,
                     int threads, latbench_error *error) {
    int64_t x_each = count_inputs(layer), y_each = count_outputs(layer);
    call_slot own, *slot = take_slot(model);
    if (!slot) {
        memset(&own, 0, sizeof own);
        slot = &own;
    }
    int code = prepare_slot(model, slot, error);
    for (int64_t done = 0; !code && done < size;) {
        const program_entry *program = choose_program(model, layer, size - done, threads);
        call_places places = {x + done * x_each, y + done * y_each, at(model, layer->bias)};
        code = run_program(model, program, slot, &places, threads, error);
        done += (int64_t)program->size;
    }
    if (slot == &own) empty_slot(model, slot);
    else atomic_flag_clear_explicit(&slot->taken, memory_order_release);
    return code;
}

/* each: floats of one input or result, the more of both. */
static int check_call(const void *x, const void *y, int64_t size, int64_t each, int threads, latbench_error *error) {
    set_error(error, LATBENCH_OK, "%s", "");
    if (threads < 1 || threads > MOST_THREADS)
        return set_error(error, LATBENCH_BAD_ARGUMENT, "threads must be 1 to %d, not %d", MOST_THREADS, threads);
    if (size < 0) return set_error(error, LATBENCH_BAD_ARGUMENT, "there cannot be %lld inputs", (long long)size);
    if (size > MOST_FLOATS / each)
        return set_error(error, LATBENCH_BAD_ARGUMENT, "%lld inputs are more than memory can have", (long long)size);
    if (size && (!x || !y)) return set_error(error, LATBENCH_BAD_ARGUMENT, "x and y must not be NULL");
    return LATBENCH_OK;
}

int latbench_linear(latbench_model *model, int layer, const float *x, int64_t tokens, int64_t features, float *y,
                    int64_t outputs, int threads, latbench_error *error) {
    const layer_entry *entry = find_layer(model, layer);
    if (!entry) return refuse_layer(model, layer, error);
    const char *name = at(model, entry->name);
    if (entry->kind != LATBENCH_LINEAR)
        return set_error(error, LATBENCH_BAD_ARGUMENT, "layer %s is a convolution: call latbench_conv2d", name);
    if (features != (int64_t)entry->inputs || outputs != (int64_t)entry->outputs)
        return set_error(error, LATBENCH_BAD_ARGUMENT,
                         "layer %s takes %lld features and gives %lld, not %lld and %lld", name,
                         (long long)entry->inputs, (long long)entry->outputs, (long long)features, (long long)outputs);
    int code = check_call(x, y, tokens, count_more(entry), threads, error);
    return code ? code : run_layer(model, entry, x, y, tokens, threads, error);
}

int latbench_conv2d(latbench_model *model, int layer, const float *x, int64_t batch, int64_t channels, int64_t height,
                    int64_t width, float *y, int64_t y_size, int threads, latbench_error *error) {
    const layer_entry *entry = find_layer(model, layer);
    if (!entry) return refuse_layer(model, layer, error);
    const char *name = at(model, entry->name);
    if (entry->kind != LATBENCH_CONV2D)
        return set_error(error, LATBENCH_BAD_ARGUMENT, "layer %s is linear: call latbench_linear", name);
    if (channels != (int64_t)entry->x[0] || height != (int64_t)entry->x[1] || width != (int64_t)entry->x[2])
        return set_error(error, LATBENCH_BAD_ARGUMENT,
                         "layer %s was exported for images of %lldx%lldx%lld, not %lldx%lldx%lld", name,
                         (long long)entry->x[0], (long long)entry->x[1], (long long)entry->x[2], (long long)channels,
                         (long long)height, (long long)width);
    int code = check_call(x, y, batch, count_more(entry), threads, error);
    int64_t each = count_outputs(entry);
    if (!code && batch && y_size / batch < each)
        return set_error(error, LATBENCH_BAD_ARGUMENT, "layer %s gives %lld floats an image: y has room for %lld", name,
                         (long long)each, (long long)y_size);
    return code ? code : run_layer(model, entry, x, y, batch, threads, error);
}

typedef struct { const float *a, *b; float *y; int64_t size; int relu; int64_t parts; } add_job;

#ifdef __x86_64__
__attribute__((target("avx2"))) /* of every CPU level, so of every machine that opens a model */
#endif
static void add_floats(const float *a, const float *b, float *y, int64_t size, int relu) {
    for (int64_t i = 0; i < size; i++) {
        float sum = b ? a[i] + b[i] : a[i];
        y[i] = relu && sum < 0 ? 0 : sum;
    }
}

static void add_part(void *given, int64_t part) {
    const add_job *job = given;
    int64_t first = job->size * part / job->parts, behind = job->size * (part + 1) / job->parts;
    add_floats(job->a + first, job->b ? job->b + first : NULL, job->y + first, behind - first, job->relu);
}

int latbench_add(latbench_model *model, const float *a, const float *b, float *y, int64_t size, int relu, int threads,
                 latbench_error *error) {
    int code = check_call(a, y, size, 1, threads, error);
    if (code) return code;
    int64_t parts = size / SHARE_FLOATS < threads ? size / SHARE_FLOATS : threads;
    add_job job = {a, b, y, size, relu, parts < 1 ? 1 : parts};
    call_slot *slot = job.parts > 1 ? take_slot(model) : NULL;
    if (slot && !prepare_slot(model, slot, NULL)) run_parts(model, slot, add_part, &job, job.parts, threads);
    else for (int64_t part = 0; part < job.parts; part++) add_part(&job, part);
    if (slot) atomic_flag_clear_explicit(&slot->taken, memory_order_release);
    return LATBENCH_OK;
}

static float *allocate_floats(int64_t floats) {
    void *found = NULL;
    return posix_memalign(&found, LINE, (size_t)(floats ? floats : 1) * sizeof(float)) ? NULL : found;
}

float *latbench_borrow(latbench_model *model, int64_t floats, latbench_error *error) {
    if (floats < 0 || floats > MOST_FLOATS) {
        set_error(error, LATBENCH_BAD_ARGUMENT, "there is no memory of %lld floats", (long long)floats);
        return NULL;
    }
    float *found = NULL;
    for (int growing = 0; growing < 2; growing++)
        for (int i = 0; i < SLOTS; i++) {
            lent_memory *each = model->lent + i;
            if (atomic_flag_test_and_set_explicit(&each->taken, memory_order_acquire)) continue;
            if (each->floats < floats && growing) {
                /* First out of the slot: once freed, the address may be another call's, which gives it back. */
                free(atomic_exchange(&each->memory, NULL));
                each->memory = allocate_floats(floats);
                each->floats = each->memory ? floats : 0;
            }
            if (each->memory && each->floats >= floats) return each->memory;
            atomic_flag_clear_explicit(&each->taken, memory_order_release);
        }
    if (!(found = allocate_floats(floats))) fail_for_memory(error);
    return found;
}

void latbench_give_back(latbench_model *model, float *memory) {
    if (!memory) return;
    for (int i = 0; i < SLOTS; i++)
        if (model->lent[i].memory == memory) {
            atomic_flag_clear_explicit(&model->lent[i].taken, memory_order_release);
            return;
        }
    free(memory);
}
